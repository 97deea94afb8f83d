"""Models of other libraries: `retrofit` keeps their numbers and changes the code; `replace_position` changes the
position."""

from relpos.adapters.common.verification import Verdict
from relpos.adapters.replacing import replace_position
from relpos.adapters.reporting import Left, OwnPosition, ReplacementReport, ResizeReport, RetrofitReport, Swapped
from relpos.adapters.resizing import resize_position
from relpos.adapters.retrofitting import restore, retrofit

__all__ = [
    "Left",
    "OwnPosition",
    "ReplacementReport",
    "ResizeReport",
    "RetrofitReport",
    "Swapped",
    "Verdict",
    "replace_position",
    "resize_position",
    "restore",
    "retrofit",
]
