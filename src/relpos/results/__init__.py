"""`results.json` as dataclasses: what is written, what can be read, and the page that describes it are made of these.

`plain` turns them into JSON values and leaves out optional fields that say nothing. `read` turns JSON values back and
names what is missing, unknown, of another type, or does not fit the rest.
"""

from relpos.results.reading import load_results, read
from relpos.results.schema import (
    SCHEMA_VERSION,
    Attention,
    Cost,
    CurveRecord,
    Divergence,
    Environment,
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
