"""What the command `relpos` starts. It imports nothing, so that an interruption while PyTorch loads is no traceback.

`relpos.cli` is part of relpos, whose import takes a second: for that reason alone this file stands beside the package.
"""


def main() -> None:
    """Run the command line, as `relpos.cli.main` does."""
    try:
        from relpos.cli import main as run
    except KeyboardInterrupt:
        import sys

        print("relpos: error: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()
