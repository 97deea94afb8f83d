"""`relpos.compare`: from what a person asks to a result, and what is shown on the way."""

from relpos.comparing.call import compare
from relpos.comparing.display import Display
from relpos.comparing.result import ComparisonResult, ResultTable, TrainedModels

__all__ = ["ComparisonResult", "Display", "ResultTable", "TrainedModels", "compare"]
