"""The start of the command `relpos`, and its options. Neither needs PyTorch, so help and option errors are quick.

`relpos.cli` runs the parsed command; it is part of relpos, whose import takes seconds. Nothing is imported before
`main`: until all libraries are loaded, an interruption ends the process at once. As an exception it could be swallowed
by an import, or leave a library half loaded, which then fails in another way.
"""

import os
import signal


def _quit(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":  # only the main process
        os.write(2, b"relpos: error: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line, as `relpos.cli.main` does."""
    before = signal.signal(signal.SIGINT, _quit)
    from relpos_command.parsing import parse

    call = parse()
    from relpos.cli import carry_out

    carry_out(call, loaded=lambda: signal.signal(signal.SIGINT, before))
