"""The experiment: mechanisms x seeds on a task, to records and `results.json`."""

from relpos.compare.choices import CHOICES, WHATS
from relpos.compare.experiment import Comparison
from relpos.compare.settings import Job, Settings, environment, require_asked
from relpos.compare.store import OtherSettingsError, require_usable
from relpos.compare.workers import Event, WorkerError

__all__ = [
    "CHOICES",
    "WHATS",
    "Comparison",
    "Event",
    "Job",
    "OtherSettingsError",
    "Settings",
    "WorkerError",
    "environment",
    "require_asked",
    "require_usable",
]
