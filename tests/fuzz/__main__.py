"""`python -m tests.fuzz --seeds A:B`: random calls of `relpos.attention` against an oracle of their own.

    python -m tests.fuzz --seeds 0:20000                      in reference, sdpa and streaming
    python -m tests.fuzz --seeds 0:5000 --engines triton      in Triton's interpreter, on calls of a few tokens
    python -m tests.fuzz --seed 1234                          one call again, made smaller where it fails
    python -m tests.fuzz --call "Described(...)"              a call as it was printed

Ends with 1 where a call failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", metavar="A:B", help="all seeds from A to B - 1")
    what.add_argument("--seed", type=int, help="one seed")
    what.add_argument("--call", help="a description as it was printed")
    parser.add_argument("--engines", default="reference,sdpa,streaming", help="names, joined with commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--stop", type=int, default=20, metavar="N", help="stop after N failing calls")
    parser.add_argument("--no-shrink", action="store_true", help="print failing calls as they are")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    engines = tuple(given.engines.split(","))
    if "triton" in engines:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from fuzz.campaign import again, campaign
    from fuzz.description import read
    from fuzz.drawing import draw

    if given.seeds is not None:
        first, _, last = given.seeds.partition(":")
        return campaign(
            range(int(first), int(last)), engines, given.jobs, given.threads, given.stop, not given.no_shrink
        )
    call = draw(given.seed, engines) if given.call is None else read(given.call)
    return again(call, engines, given.threads, not given.no_shrink)


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.1f} s")
    sys.exit(code)
