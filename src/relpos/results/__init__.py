"""`results.json` as dataclasses: they define the file's writer, its reader and the page that describes it.

`plain` converts them to JSON values and omits empty optional fields. `read` converts JSON values back and names any
that are missing, unknown, of the wrong type, or inconsistent.
"""

from relpos.results.reading import load_results, read
from relpos.results.schema import (
    SCHEMA_VERSION,
    Attention,
    Cost,
    CurveRecord,
    Divergence,
    Environment,
    Failure,
    Learned,
    MechanismRecord,
    Metric,
    Parameters,
    ProbeRecord,
    RecipeRecord,
    Results,
    Run,
    Sample,
    SettingsRecord,
    TaskRecord,
    Time,
    What,
    is_required,
)
from relpos.results.typed import ResultsError, plain

__all__ = [
    "SCHEMA_VERSION",
    "Attention",
    "Cost",
    "CurveRecord",
    "Divergence",
    "Environment",
    "Failure",
    "Learned",
    "MechanismRecord",
    "Metric",
    "Parameters",
    "ProbeRecord",
    "RecipeRecord",
    "Results",
    "ResultsError",
    "Run",
    "Sample",
    "SettingsRecord",
    "TaskRecord",
    "Time",
    "What",
    "is_required",
    "load_results",
    "plain",
    "read",
]
