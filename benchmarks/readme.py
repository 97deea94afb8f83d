"""Write the README's tables of speed from the results that are there.

    python benchmarks/readme.py [--check]

From `<!-- benchmark cpu -->` to the last `<!-- end -->` stand the table of `results/attention-cpu.json` and, once it
was measured, that of `results/attention-cuda.json`. --check writes nothing and exits with 1 where README and results
differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relpos.bench.cases import Case, families, gpu_families
from relpos.bench.peers import DENSE, FLEX, FREE, FREE_CUDNN, FREE_OURS
from relpos.bench.picture import where
from relpos.bench.targets import targets

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BLOCKS = re.compile(r"<!-- benchmark cpu -->\n.*<!-- end -->", re.DOTALL)
COLUMNS = {
    "cpu": {"relpos-auto": "relpos", DENSE: "a dense bias, as in most code"},
    "cuda": {
        "relpos-auto": "relpos", FREE_OURS: "its kernels without a bias", FREE_CUDNN: "SDPA without a bias, cuDNN",
        FLEX: "FlexAttention", DENSE: "a dense bias, as in most code",
    },
}  # fmt: skip
WORDS = {"cpu": "", "cuda": 'On a GPU, `backend="triton"`, in bfloat16, against FlashAttention without a bias:\n\n'}
"""What stands before a table."""


def rows(device: str) -> tuple[Case, ...]:
    """The cases of the table: those with a target, but for windows and layers, which have other yardsticks."""
    found = families()["target"] if device == "cpu" else gpu_families()["gpu-target"]
    return tuple(case for case in found if not case.layer and case.batch == 1 and case.sizes != (16384,))


def cell(entry: Mapping[str, Any] | None) -> str:
    """A ratio with its quartiles."""
    if entry is None or entry["ratio"] is None:
        return ""
    ratio = entry["ratio"]
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"


def table(results: Mapping[str, Any], device: str) -> str:
    """The results in Markdown."""
    words = {target.case: target.words for target in reversed(targets())}
    found = {(entry["case"], entry["peer"]): entry for entry in results["entries"]}
    measured = {peer for (_, peer), entry in found.items() if entry["ratio"] is not None}
    columns = {peer: title for peer, title in COLUMNS[device].items() if peer in measured}
    lines = [f"| case | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for case in rows(device):
        if (case.name, FREE) in found:
            cells = (cell(found.get((case.name, peer))) for peer in columns)
            lines.append(f"| {words[case.name]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"*{where(results)}.{ceilings(results)}*", ""])


def ceilings(results: Mapping[str, Any]) -> str:
    """What the GPU reached by a product and by a copy alone."""
    found = results.get("ceilings")
    if found is None:
        return ""
    return f" One product alone reaches {found['tflop_a_second']:,} TFLOP/s, a copy {found['gb_a_second']:,} GB/s."


def written(text: str, folder: Path = HERE / "results") -> str:
    """README with the tables of the results in a folder: from the first marker to the last end."""
    found = []
    for device, words in WORDS.items():
        path = folder / f"attention-{device}.json"
        if path.exists():
            block = table(json.loads(path.read_text(encoding="utf-8")), device)
            found.append(f"{words}<!-- benchmark {device} -->\n{block}<!-- end -->")
    return BLOCKS.sub(lambda _: "\n\n".join(found), text)


def main() -> int:
    """Write it, or with --check say whether it is written."""
    text = README.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return int(written(text) != text)
    README.write_text(written(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
