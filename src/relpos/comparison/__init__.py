"""The experiment: mechanisms x seeds on a task, to records and `results.json`."""

from relpos.comparison.choices import CHOICES, WHATS
from relpos.comparison.experiment import Comparison
from relpos.comparison.settings import ComparisonSettings, Job, environment, require_asked
from relpos.comparison.store import OtherSettingsError, require_usable
from relpos.comparison.workers import Event, WorkerError

__all__ = [
    "CHOICES",
    "WHATS",
    "Comparison",
    "ComparisonSettings",
    "Event",
    "Job",
    "OtherSettingsError",
    "WorkerError",
    "environment",
    "require_asked",
    "require_usable",
]
