"""The command `relpos`: one file a verb. A user's error is one line and exit code 2; `--debug` shows the traceback."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

VERBS = {
    "compare": "train the same model with each position mechanism and show what each is good for",
    "train": "train one model and save its weights",
    "list": "list positions, tasks or backends",
}


def _fail(message: str, code: int) -> NoReturn:
    print(f"relpos: error: {message}", file=sys.stderr)
    raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; raises `SystemExit` with 0, 1 (a bug), 2 (a user's error) or 130 (interrupted)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        from jsonargparse import ArgumentParser
        from rich import print as _  # noqa: F401
    except ImportError as error:
        _fail(f"the command needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)
    parser = ArgumentParser(prog="relpos", description="A sense of position for Transformers.")
    verbs = parser.add_subcommands(dest="verb", required=True)
    modules = {}
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        _fail(f"expected one of {', '.join(VERBS)}; got {words[0]!r}.{hint}", 2)
    for verb, summary in VERBS.items():
        modules[verb] = importlib.import_module(f"relpos.cli.{verb}_verb")
        sub = ArgumentParser(description=summary)
        modules[verb].add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        verbs.add_subcommand(verb, sub, help=summary)
    parsed = parser.parse_args(words)
    try:
        modules[parsed.verb].run(parsed[parsed.verb])
    except KeyboardInterrupt:
        if debug:
            raise
        _fail("interrupted; what was finished is kept, and the same call goes on from there", 130)
    except ImportError as error:
        if debug:
            raise
        _fail(f"this needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)
    except (ValueError, OSError, NotImplementedError) as error:
        if debug:
            raise
        _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (a bug in relpos; --debug shows where)", 1)
