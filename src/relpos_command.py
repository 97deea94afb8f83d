"""What the command `relpos` starts. It imports nothing slow, so that an interruption while PyTorch loads is one line.

`relpos.cli` is part of relpos, whose import takes a second: for that reason alone this file stands beside the package.
Until all libraries are there, an interruption ends the process at once. As an exception it would pass through imports
that swallow it, or leave a library half loaded, which then fails in a way of its own.
"""

import os
import signal


def _quit(*_: object) -> None:
    os.write(2, b"relpos: error: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line, as `relpos.cli.main` does."""
    before = signal.signal(signal.SIGINT, _quit)
    from relpos.cli import main as run

    run(loaded=lambda: signal.signal(signal.SIGINT, before))
