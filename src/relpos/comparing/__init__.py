"""`relpos.compare`: from the user's arguments to a result, and the progress shown meanwhile."""

from relpos.comparing.call import compare
from relpos.comparing.display import Display
from relpos.comparing.result import ComparisonResult, ResultTable, TrainedModels

__all__ = ["ComparisonResult", "Display", "ResultTable", "TrainedModels", "compare"]
