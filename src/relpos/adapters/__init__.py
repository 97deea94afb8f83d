"""Models of other libraries: `retrofit` gives them relpos's attention with the same numbers, `replace_position` another
position."""

from relpos.adapters.replacing import replace_position
from relpos.adapters.reporting import Left, OwnPosition, ReplacementReport, RetrofitReport, Swapped
from relpos.adapters.retrofitting import restore, retrofit
from relpos.adapters.verification import Verdict

__all__ = [
    "Left",
    "OwnPosition",
    "ReplacementReport",
    "RetrofitReport",
    "Swapped",
    "Verdict",
    "replace_position",
    "restore",
    "retrofit",
]
