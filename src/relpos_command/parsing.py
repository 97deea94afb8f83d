"""Parse the command line with jsonargparse. Its messages become one line and exit code 2."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
from argparse import Action
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from relpos_command.option import add_options, read
from relpos_command.requests import VERBS
from relpos_command.visible import visible


@dataclass(frozen=True)
class CommandLine:
    """The parsed command.

    Attributes:
        verb: a key of `VERBS`. request: what it is asked. debug: whether an error shows its traceback.
    """

    verb: str
    request: Any
    debug: bool


def fail(message: str, code: int, *, process: int | None = None) -> NoReturn:
    """End with a message: one line, wrapped at words on a terminal.

    Args:
        process: the number of a process that reports its own error. By default all have the same error, and the main
            process reports it.
    """
    if process is None and int(os.environ.get("RANK", "0")) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SystemExit(code)
    lines = [visible(line.strip()) for line in message.split("\n") if line.strip()]
    whole = f"relpos: error: {'' if process is None else f'process {process}: '}{' '.join(lines) or 'no message'}"
    if sys.stderr.isatty():
        width = max(1, shutil.get_terminal_size().columns)
        whole = textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False)
    print(whole, file=sys.stderr)
    raise SystemExit(code)


_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$", re.DOTALL)


def _plain(message: str, verb: str | None, options: Iterable[str]) -> str:
    """jsonargparse's message with its internal option names replaced by typed ones, such as `--position`."""
    if verb is None:
        return "expected a verb; got none" if "was not provided" in message else message
    typed = {option.removeprefix("--").replace("-", "_"): option for option in options}
    return re.sub(rf"\b{verb}\.(\w+)", lambda name: typed.get(name[1], name[1].upper()), message)


IN_PYTHON = {
    "explain": "print(relpos.explain(q, k, v, position=...))",
    "attention": "relpos.attention(q, k, v, position=...)",
    "replace": 'relpos.replace_position(model, "rotary_2d")',
}
"""Words that are no verbs of the command, but functions of relpos in Python."""


def _version() -> str:
    """The version, read from its file: importing relpos takes seconds."""
    file = Path(__file__).parents[1] / "relpos" / "version.py"
    return str(re.findall(r'__version__ = "([^"]*)"', file.read_text(encoding="utf-8"))[0])


def _nearest(words: Iterable[str], known: Iterable[str]) -> str:
    """A "Did you mean" question for the first unknown word, if one of `known` is near."""
    known = list(known)
    unknown = [word.partition("=")[0] for word in words if word.partition("=")[0] not in known]
    near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5) if unknown else []
    return f" Did you mean {near[0]}?" if near else ""


def parse(words: Sequence[str] | None = None) -> CommandLine:
    """Parse the words, by default those of the process.

    Raises:
        SystemExit: 0 after help; 2 if they are wrong.
    """
    try:
        from jsonargparse import ArgumentParser, DefaultHelpFormatter
    except ImportError as error:
        fail(f"the command needs {error.name}; install it with: pip install 'relpos[cli,train,report]'", 2)

    arguments = sys.argv[1:] if words is None else words
    typed = [word for word in arguments if word != "--debug"]

    class Formatter(DefaultHelpFormatter):  # type: ignore[misc, unused-ignore]
        """jsonargparse's formatter, with an option's help unchanged, as it states types and defaults."""

        def _get_help_string(self, action: Action) -> str:
            return action.help or ""

    class Parser(ArgumentParser):  # type: ignore[misc, unused-ignore]
        """jsonargparse's parser, with error messages in one line and without usage."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            verb = typed[0] if typed[:1] and typed[0] in VERBS else None
            known = list(verbs.choices[verb]._option_string_actions) if verb else list(VERBS)
            message = _plain(message.strip().rstrip("."), verb, known)
            unsure = [word for word in typed if word.startswith("--")] if verb else typed[:1]
            if of_choice := _CHOICE.search(message):
                unsure, known = [of_choice[1]], re.findall(r"[\w.-]+", of_choice[2])
            see = f"See relpos {verb} --help." if verb else "See relpos --help."
            if verb is None and (call := IN_PYTHON.get(typed[0] if typed else "")):
                fail(f"expected a verb among {', '.join(VERBS)}; got {typed[0]!r}. In Python: {call}. {see}", 2)
            fail(f"{message}.{_nearest(unsure, known)} {see}", 2)

    parser = Parser(
        prog="relpos",
        formatter_class=Formatter,
        description="Position mechanisms for Transformers: compare them on your data.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"relpos {_version()}", help="print the version")
    verbs = parser.add_subcommands(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        sub = Parser(formatter_class=Formatter, description=verb.summary, allow_abbrev=False)
        add_options(verb.request, sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        verbs.add_subcommand(name, sub, help=verb.summary)
    parsed = parser.parse_args(typed)
    try:
        request: Any = read(VERBS[parsed.verb].request, parsed[parsed.verb])
    except ValueError as error:
        if "--debug" in arguments:
            raise
        fail(str(error), 2)
    return CommandLine(parsed.verb, request, debug="--debug" in arguments)
