"""The experiment: train mechanisms x seeds on a task; write records and `results.json`."""

from relpos.comparison.callables import find_build, find_function, not_told_apart
from relpos.comparison.choices import CHOICES, WHATS
from relpos.comparison.experiment import Comparison
from relpos.comparison.request import OWN
from relpos.comparison.settings import ComparisonSettings, Job, default_folder, environment, listed
from relpos.comparison.store import OtherSettingsError, require_usable
from relpos.comparison.workers import Event, WorkerError, random_state_kept

__all__ = [
    "CHOICES",
    "OWN",
    "WHATS",
    "Comparison",
    "ComparisonSettings",
    "Event",
    "Job",
    "OtherSettingsError",
    "WorkerError",
    "default_folder",
    "environment",
    "find_build",
    "find_function",
    "listed",
    "not_told_apart",
    "random_state_kept",
    "require_usable",
]
