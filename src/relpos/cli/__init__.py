"""Run the command `relpos`: one file per verb. A user's error is one line and exit code 2."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence

from relpos.cli.errors import end, is_lost_connection
from relpos_command.parsing import CommandLine, fail, parse
from relpos_command.requests import VERBS as VERBS

_RESUMABLE = "finished work is kept; the same command continues from there"
REMAINS = {"compare": _RESUMABLE, "bench": _RESUMABLE, "train": "checkpoints are kept", "show": "nothing was drawn"}
"""What remains of a verb's work if it is interrupted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: 0; 1 for a bug, or an engine that failed `check`; 2 for a user's error; 130 if interrupted.
    """
    carry_out(parse(arguments))


def carry_out(call: CommandLine, loaded: Callable[[], object] = lambda: None) -> None:
    """Run a parsed command.

    Args:
        loaded: called after the verb's libraries are imported.

    Raises:
        SystemExit: as `main`.
    """
    remains = REMAINS.get(call.verb)
    try:
        _run(call, loaded)
    except KeyboardInterrupt:
        if call.debug:
            raise
        end("interrupted" if remains is None else f"interrupted; {remains}", 130)
    except ImportError as error:
        if call.debug:
            raise
        fail(f"this needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)
    except (ValueError, OSError, NotImplementedError) as error:
        if call.debug:
            raise
        end(_ends(_user_error(error, remains)), 2)
    except Exception as error:
        if call.debug:
            raise
        if _is_told(error):
            end(str(error), 1)
        if is_lost_connection(error):
            end(f"another process ended or does not respond{f'; {remains}' if remains else ''}", 1)
        cause = _ends(str(error)) or "no message"  # for a worker: its name and the traceback's last line
        end(f"{type(error).__name__}: {cause} (--debug shows where; unless memory ran out, this is a bug in relpos)", 1)


def _is_told(error: Exception) -> bool:
    """Whether an error's message says all: work failed on other machines."""
    from relpos.comparison.executors import TrialsFailedError

    return isinstance(error, TrialsFailedError)


def _ends(message: str) -> str:
    """The first and the last line of a message."""
    lines = [line.strip() for line in message.split("\n") if line.strip()]
    return " ".join(lines[:1] + lines[1:][-1:])


def _user_error(error: Exception, remains: str | None) -> str:
    """The error in one line; for a file that could not be written, also what remains."""
    from relpos.files.writing import UnwritableError, WriteError

    if isinstance(error, WriteError):
        begun = not isinstance(error, UnwritableError)
        return f"{error} {remains[0].upper()}{remains[1:]}." if remains and begun else str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _run(call: CommandLine, loaded: Callable[[], object]) -> None:
    module = importlib.import_module(f"relpos.cli.{call.verb}_verb")
    if hasattr(module, "require_names"):  # report a misspelt name before slow imports
        module.require_names(call.request)
    for name in getattr(module, "LIBRARIES", ()):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # the verb reports a missing one
            importlib.import_module(name)
    loaded()
    module.run(call.request)
