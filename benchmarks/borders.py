"""Where `streaming` becomes faster than `sdpa` on this machine: the borders of `relpos/engines/selection.py`, again.

    python benchmarks/borders.py [NAME ...] [--rounds 9] [--threads 2]

Of each border, the time of `streaming` in that of `sdpa`, one call of each in turn: at about half the pairs, at the
border and at twice. A border that is right has a ratio above 1 before it and below 1 behind it. 8 heads of 64,
float32. Run it alone. It writes no file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import relpos
from relpos import (
    DisentangledPosition,
    Grid,
    Mask,
    PolarEmbedding,
    RelativePositionBias,
    Sequence,
    T5Bias,
    TransformerXLPosition,
)
from relpos.bench.measure import interleaved, quartiles
from relpos.bench.peers import Workload
from relpos.engines import selection
from relpos.patterns import longformer

HEADS, WIDTH = 8, 64
ENGINES = ("streaming", "sdpa")


@dataclass(frozen=True)
class Border:
    """Pairs from which `streaming` is taken, and calls that it is for.

    Attributes:
        pairs: where it is. given: what `relpos.attention` is given beside q, k and v of so many tokens. step: whether
            gradients are taken. batch: elements.
    """

    pairs: int
    given: Callable[[int], dict[str, Any]]
    step: bool = True
    batch: int = 1


def on_line(make: Callable[[int], relpos.Mechanism], **more: Any) -> Callable[[int], dict[str, Any]]:
    return lambda n: {"position": make(n), "queries": Sequence(n), **more}


def on_grid(n: int, *, learned: bool = True) -> dict[str, Any]:
    side = math.isqrt(n)
    return {"position": RelativePositionBias(HEADS, (side, side)).requires_grad_(learned), "queries": Grid(side, side)}


def t5(n: int) -> relpos.Mechanism:
    return T5Bias(HEADS)


def deberta(n: int) -> relpos.Mechanism:
    return DisentangledPosition(HEADS, WIDTH, HEADS * WIDTH)


def ended(n: int) -> dict[str, Any]:
    """A causal bias of 16 numbers a token and head, which ends at a distance of 1,024 (Inkling's)."""
    line, extent, width = relpos.lines(Sequence(n)), 1024, 16
    distance = line.offsets().axes[:, 0]
    index = torch.where((distance >= 0) & (distance < extent), distance, -1)
    rows = torch.randn(HEADS, extent, width, requires_grad=True)
    content = torch.randn(1, HEADS, n, width, requires_grad=True)
    term = relpos.LineVectors(rows, index, line, "query", scaled=False, content=content)
    return {"position": term, "mask": "causal"}


BORDERS = {
    "line": Border(selection.LINE, on_line(t5, mask="causal")),
    "line_in_a_batch": Border(2 * selection.LINE, on_line(t5), batch=4),
    "grid": Border(selection.GRID, on_grid),
    "key_vectors": Border(selection.KEY_VECTORS, on_line(deberta, mask=Mask.window(64, 64))),
    "few_vectors": Border(selection.FEW_VECTORS, on_line(lambda n: TransformerXLPosition(HEADS, WIDTH, HEADS * WIDTH))),
    "content": Border(selection.FEW_VECTORS, ended),
    "line_forward": Border(selection.LINE_FORWARD, on_line(t5, mask=Mask.window(64, 64)), step=False),
    "grid_forward": Border(selection.GRID_FORWARD, on_grid, step=False),
    "fixed": Border(selection.FIXED, lambda n: on_grid(n, learned=False)),
    "wider": Border(selection.WIDER // HEADS, on_line(lambda n: PolarEmbedding(HEADS, WIDTH), mask="causal")),
    "window": Border(selection.WINDOW, lambda n: on_grid(n, learned=False) | {"mask": Mask.window(64, 64)}),
    "right": Border(selection.MASKED, lambda n: {"mask": Mask(right=n // 8)}),
    "masked": Border(selection.MASKED, lambda n: {"mask": Mask.window(n // 2, 0)}),
    "pattern": Border(selection.PATTERN, lambda n: {"mask": longformer(n, 65, [0])}),
    "dropout": Border(selection.DROPOUT, on_line(t5, dropout=0.1)),
    "of_many": Border(selection.OF_MANY, on_line(t5, mask="causal"), batch=256),
}  # fmt: skip


def tokens(border: Border, pairs: int) -> int:
    """The tokens of a call of about so many pairs, no more; of a grid a square number of them."""
    n = math.isqrt(pairs)
    return math.isqrt(n) ** 2 if isinstance(border.given(4).get("queries"), Grid) else n


def work(border: Border, n: int, backend: str) -> Workload:
    """A call of an engine, of n tokens."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(border.batch, HEADS, n, WIDTH) for _ in range(4))
    given = border.given(n)
    position = given.get("position")
    if isinstance(position, relpos.LineVectors):
        learned = [x for x in (position.vectors, position.content) if x is not None]
    else:
        learned = [] if position is None else [*position.parameters()]

    def forward() -> Tensor:
        out = relpos.attention(q, k, v, backend=backend, **given)
        assert isinstance(out, Tensor)
        return out

    leaves = tuple(x.requires_grad_() for x in (q, k, v)) + tuple(x for x in learned if x.requires_grad)
    return Workload(forward, leaves if border.step else (), upstream)


def main() -> None:
    """Time what is asked for."""
    parser = argparse.ArgumentParser(description="where streaming becomes faster than sdpa on this machine")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BORDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(BORDERS):
        parser.error(f"expected names among {', '.join(BORDERS)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(asked.threads)
    for name in asked.names or BORDERS:
        border = BORDERS[name]
        for pairs in (border.pairs // 2, border.pairs, 2 * border.pairs):
            n = tokens(border, pairs)
            times, reasons = interleaved({engine: work(border, n, engine) for engine in ENGINES}, 2, asked.rounds)
            if reasons:
                print(f"{name:16} {n:6,} tokens: not timed: {reasons}", flush=True)
                continue
            found = quartiles([a / b for a, b in zip(*times.values(), strict=True)], 2)
            said = f"{found['median']:.2f} [{found['q1']:.2f}, {found['q3']:.2f}]"
            print(f"{name:16} {n:6,} tokens: streaming takes {said} of sdpa's time", flush=True)


if __name__ == "__main__":
    main()
