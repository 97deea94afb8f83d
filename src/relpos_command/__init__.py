"""What the command `relpos` starts, and the options it takes. Neither needs PyTorch: help and a wrong option are quick.

`relpos.cli` is part of relpos, whose import takes seconds; it carries out what was parsed here. Nothing is imported
above `main`: until all libraries are there, an interruption ends the process at once. As an exception it would pass
through imports that swallow it, or leave a library half loaded, which then fails in a way of its own.
"""

import os
import signal


def _quit(*_: object) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes the main one
        os.write(2, b"relpos: error: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line, as `relpos.cli.main` does."""
    before = signal.signal(signal.SIGINT, _quit)
    from relpos_command.parsing import parse

    call = parse()
    from relpos.cli import carry_out

    carry_out(call, loaded=lambda: signal.signal(signal.SIGINT, before))
