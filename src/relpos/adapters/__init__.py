"""Models of other libraries: `retrofit` gives them relpos's attention with the same numbers."""

from relpos.adapters.reporting import Left, RetrofitReport, Swapped
from relpos.adapters.retrofitting import restore, retrofit
from relpos.adapters.verification import Verdict

__all__ = ["Left", "RetrofitReport", "Swapped", "Verdict", "restore", "retrofit"]
