"""The file that a verb writes: known to be writable, and not to replace another, before the work."""

from __future__ import annotations

from pathlib import Path


def free_file(
    path: Path, known: tuple[str, ...] | None = None, *, option: str = "--out", overwrite: bool | None = None
) -> Path:
    """The file to write; it must have a supported ending, by default a picture's, and must not exist.

    Args:
        overwrite: whether it may exist; None for a verb that has no --overwrite.
    """
    from relpos.core.checks import fail
    from relpos.files.writing import require_writable

    if known is None:
        from relpos.report.drawing.mechanism_picture import ENDINGS

        known = ENDINGS
    if path.is_dir():
        fail(
            f"a file for {option}",
            f"the folder {path}",
            f"Write for example {option} {path / f'show.{known[0]}'}.",
        )
    if path.suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(f".{ending}" for ending in known)
        wanted = f"{option} to end in {'one of ' if len(known) > 1 else ''}{endings}"
        fail(wanted, str(path), f"Write for example {option} {path.stem or 'show'}.{known[0]}.")
    if path.exists() and not overwrite:
        remedy = "nothing is overwritten" if overwrite is None else "or add --overwrite"
        fail("a file that does not exist yet", str(path), f"Choose another {option}; {remedy}.")
    if not path.parent.is_dir():
        fail(f"{option} in a folder that exists", str(path), f"Create {path.parent} first.")
    require_writable(path.parent)
    return path
