"""The command `relpos`: one file a verb. A user's error is one line and exit code 2; `--debug` shows the traceback."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

VERBS = {
    "compare": "train the same model with each position mechanism and show what each is good for",
    "train": "train one model and save its weights",
    "show": "draw a position mechanism, or what a trained model's position learned",
    "bench": "time the attention engines beside PyTorch's own and other libraries', and measure their memory",
    "check": "hold every attention engine of this machine against the definition, and print a table to report",
    "list": "list positions, tasks or backends",
}


def _fail(message: str, code: int) -> NoReturn:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    whole = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}" if lines else "no message"
    print(f"relpos: error: {whole}", file=sys.stderr)
    raise SystemExit(code)


def _near(word: str, words: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def _usage_error(message: str, options: Iterable[str], verb: str) -> str:
    """What the parser found wrong, in the form of the library's own messages."""
    see = f"See relpos {verb} --help."
    if found := re.match(r"unrecognized arguments: (.*)", message):
        word = found[1].split()[0]
        return f"expected options of relpos {verb}; got {found[1]!r}. {_near(word.split('=')[0], options, see)}"
    if found := re.match(r"the following arguments are required: (.*)", message):
        names = ", ".join(name.rpartition(".")[2] for name in found[1].split(", "))
        return f"expected a value for {names}; got none. {see}"
    if found := re.match(r'Parser key "([\w.]+)":.*(?:Got|Given) value: (.*)', message, flags=re.DOTALL):
        return f"expected a whole number for --{found[1].replace('_', '-')}; got {found[2].splitlines()[0]!r}. {see}"
    return f"{' '.join(message.split())}. {see}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: with 0; 1 for a bug, or an engine that `check` found wrong; 2 for a user's error; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        from jsonargparse import ArgumentParser
        from rich import print as _  # noqa: F401
    except ImportError as error:
        _fail(f"the command needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)

    class Parser(ArgumentParser):  # type: ignore[misc, unused-ignore]
        """jsonargparse's, with an error of one line."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            _fail(_usage_error(message, self._option_string_actions, words[0]), 2)

    parser = Parser(prog="relpos", description="A sense of position for Transformers.")
    verbs = parser.add_subcommands(dest="verb", required=True)
    modules = {}
    if not words:
        _fail(f"expected one of {', '.join(VERBS)}; got none. See relpos --help.", 2)
    if words[0] not in (*VERBS, "-h", "--help"):
        _fail(
            f"expected one of {', '.join(VERBS)}; got {words[0]!r}. {_near(words[0], VERBS, 'See relpos --help.')}", 2
        )
    for verb, summary in VERBS.items():
        modules[verb] = importlib.import_module(f"relpos.cli.{verb}_verb")
        sub = Parser(description=summary)
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
        what = str(error).strip().splitlines() or ["no message"]
        cause = what[0] if len(what) == 1 else f"{what[0]} {what[-1]}"  # a worker's traceback: its name and its end
        _fail(f"{type(error).__name__}: {cause} (--debug shows where; unless memory ran out, a bug in relpos)", 1)
