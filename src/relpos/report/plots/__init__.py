"""Pictures made with matplotlib: what was learned, attention over images, and the overview for a README."""

from relpos.report.plots.attention import attention_svgs
from relpos.report.plots.learned import learned_svgs
from relpos.report.plots.overview import save_overview

__all__ = ["attention_svgs", "learned_svgs", "save_overview"]
