"""Python that trains one of the compared models outside the command."""

from relpos.report.command import command_line
from relpos.results import read


def reproduce(results: object, position: str) -> str:
    """Source text that trains the model with this mechanism; for now, what runs the command."""
    return f"import os\n\nos.system({command_line(read(results))!r})  # {position}\n"
