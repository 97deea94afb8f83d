"""A model card from the model itself; `relpos train` makes one that describes its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from relpos.version import __version__
from relpos_command.visible import visible

FRONT = "---\nlibrary_name: relpos\ntags:\n- relpos\n- position\n---\n"
"""The metadata that a model hub reads."""


def model_card(
    kind: str, parameters: int, arguments: Mapping[str, Any], grown: Iterable[Mapping[str, Any]], folder: str
) -> str:
    """Markdown with the model's class, how to load it, and the arguments it was built with.

    Args:
        kind: its class. parameters: number of parameters. grown: its calls of `grow`.
        folder: the folder it is loaded from.
    """
    rows = [f"| `{name}` | `{value}` |" for name, value in arguments.items()]
    rows += [f"| then `grow` | `{step}` |" for step in grown]
    whole = "\n".join(
        [
            f"{FRONT}\n# {folder}\n",
            f"A `relpos.{kind}` with {parameters:,} parameters, saved by relpos {__version__}. Its training and "
            "quality are not recorded.\n",
            f"{usage(kind, folder)}\n\n## Built with\n\n| argument | value |\n|---|---|",
            *rows,
            "",
        ]
    )
    return visible(whole, keep="\n")


def usage(kind: str, folder: str) -> str:
    """The lines that load a model."""
    return f"```python\nimport relpos\n\nmodel = relpos.{kind}.from_pretrained({folder!r})\n```"
