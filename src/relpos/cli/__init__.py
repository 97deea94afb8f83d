"""The command `relpos`: one file a verb. A user's error is one line and exit code 2; `--debug` shows the traceback."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

VERBS = {
    "compare": "train the same model with each position mechanism and show what each is good for",
    "train": "train one model and save its weights",
    "show": "draw a position mechanism, or what a trained model's position learned",
    "bench": "time the attention engines beside PyTorch's own and other libraries', and measure their memory",
    "check": "hold every attention engine of this machine against the definition, and print a table to report",
    "list": "list positions, tasks or backends",
}
_GOES_ON = "what was finished is kept, and the same call goes on from there"
KEPT = {"compare": _GOES_ON, "bench": _GOES_ON, "train": "nothing was saved", "show": "nothing was drawn"}
"""What is left of a verb's work where it is cut short."""
_DIGITS = 40
"""A number with more is not printed."""


def _fail(message: str, code: int) -> NoReturn:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    whole = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}" if lines else "no message"
    print(f"relpos: error: {whole}", file=sys.stderr)
    raise SystemExit(code)


def _near(word: str, words: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def _usage_error(message: str, options: Iterable[str], verb: str, limits: Mapping[str, int]) -> str:
    """What the parser found wrong, in the form of the library's own messages."""
    see = f"See relpos {verb} --help."
    if found := re.match(r"unrecognized arguments: (.*)", message):
        word = (found[1].split() or [""])[0]
        return f"expected options of relpos {verb}; got {found[1]!r}. {_near(word.split('=')[0], options, see)}"
    if found := re.match(r"the following arguments are required: (.*)", message):
        names = ", ".join(name.rpartition(".")[2] for name in found[1].split(", "))
        return f"expected a value for {names}; got none. {see}"
    if found := re.match(r'Parser key "(\w+)":\s*Exceeds the limit .*value has (\d+) digits', message, re.DOTALL):
        return _beyond(found[1], limits[found[1]], f"a number of {int(found[2]):,} digits", low=False)
    if found := re.match(r'Parser key "([\w.]+)":.*(?:Got|Given) value: (.*)', message, flags=re.DOTALL):
        value = (found[2].splitlines() or [""])[0]
        return f"expected a whole number for {_option(found[1])}; got {value!r}. {see}"
    return f"{' '.join(message.split())}. {see}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _beyond(name: str, limit: int, came: str, *, low: bool) -> str:
    """A whole number below all use, or above it."""
    bound, other = (f"at least -{limit:,}", "larger") if low else (f"at most {limit:,}", "smaller")
    return f"expected {bound} for {_option(name)}; got {came}. Choose a {other} one."


def _require_values(given: Mapping[str, Any], limits: Mapping[str, int], options: Iterable[str], verb: str) -> None:
    """Raise where a value is empty, or a whole number so far from zero that nothing would come of it."""
    for name, value in given.items():
        option = _option(name) if _option(name) in options else name
        if isinstance(value, str) and not value.strip():
            _fail(f"expected a value for {option}; got {value!r}. See relpos {verb} --help.", 2)
        if name in limits and value is not None and abs(value) > limits[name]:
            digits = str(value)
            came = digits if len(digits) <= _DIGITS else f"a number of {len(digits.lstrip('-')):,} digits"
            _fail(_beyond(name, limits[name], came, low=value < 0), 2)


def main(arguments: Sequence[str] | None = None, loaded: Callable[[], object] = lambda: None) -> None:
    """Run the command line.

    Args:
        loaded: called once all that the verb needs is imported.

    Raises:
        SystemExit: with 0; 1 for a bug, or an engine that `check` found wrong; 2 for a user's error; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    kept = KEPT.get(words[0]) if words else None
    try:
        _run(words, loaded)
    except KeyboardInterrupt:
        if debug:
            raise
        _fail("interrupted" if kept is None else f"interrupted; {kept}", 130)
    except ImportError as error:
        if debug:
            raise
        _fail(f"this needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)
    except (ValueError, OSError, NotImplementedError) as error:
        if debug:
            raise
        _fail(_user_error(error, kept), 2)
    except Exception as error:
        if debug:
            raise
        what = str(error).strip().splitlines() or ["no message"]
        cause = what[0] if len(what) == 1 else f"{what[0]} {what[-1]}"  # a worker's traceback: its name and its end
        _fail(f"{type(error).__name__}: {cause} (--debug shows where; unless memory ran out, a bug in relpos)", 1)


def _user_error(error: Exception, kept: str | None) -> str:
    """What is wrong in a line; of a file that could not be written, what is left."""
    from relpos.files.writing import UnwritableError, WriteError

    if isinstance(error, WriteError):
        begun = not isinstance(error, UnwritableError)
        return f"{error} {kept[0].upper()}{kept[1:]}." if kept and begun else str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _run(words: list[str], loaded: Callable[[], object]) -> None:
    """Read the words and carry the verb out."""
    try:
        from jsonargparse import ArgumentParser
        from rich import print as _  # noqa: F401
    except ImportError as error:
        _fail(f"the command needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)

    class Parser(ArgumentParser):  # type: ignore[misc, unused-ignore]
        """jsonargparse's, with an error of one line."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            limits = getattr(modules.get(words[0]), "LIMITS", {})
            _fail(_usage_error(message, self._option_string_actions, words[0], limits), 2)

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
    verb, module = parsed.verb, modules[parsed.verb]
    options = verbs.choices[verb]._option_string_actions
    _require_values(parsed[verb].as_dict(), getattr(module, "LIMITS", {}), options, verb)
    for name in getattr(module, "LIBRARIES", ()):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # who needs it says that it is missing
            importlib.import_module(name)
    loaded()
    module.run(parsed[verb])
