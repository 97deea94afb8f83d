"""How far a mechanism is from code that people trust: asserted by the tests, and written down by the same run.

    agree("t5", "transformers T5Attention", ours, theirs)

compares named tensors (the output, and the gradient of everything learned and of the inputs) and notes the largest
relative difference; `python -m pytest tests/position --parity docs/parity.md` runs the tests and writes all that they
noted into a table. Nothing in that table is typed by hand. `layers_agree` does so for two outputs, ours and theirs, and
the leaves that they grew from.

The relative difference of two tensors is the largest absolute difference over the largest magnitude of theirs. A
gradient that vanishes in theirs (below a millionth of their largest gradient: what cancels behind a softmax) is held
against that largest one instead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from relpos.testing.tolerance import largest

LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5}
"""What must hold where a test names no limit of its own."""

TIGHT = {dtype: 100 * torch.finfo(dtype).eps for dtype in LIMITS}
"""What must hold where ours and theirs sum the same numbers and differ in the order alone: as many units in the last
place in each dtype, since rounding is the same there but for its unit. The largest such figure of docs/parity.md is 50
units, in float64; another processor's order of sums changes one by a factor of up to 2 (`relpos.testing.tolerance`)."""


@dataclass
class Row:
    """The largest differences of one mechanism from one oracle in one dtype; None where nothing was compared.

    Attributes:
        compared: names of what was compared.
        why: why it comes no closer, where a test asks less than `LIMITS`.
    """

    output: float | None = None
    gradient: float | None = None
    compared: set[str] = field(default_factory=set)
    why: set[str] = field(default_factory=set)

    def note(self, name: str, difference: float) -> None:
        kind = "output" if name == "output" else "gradient"
        before = getattr(self, kind)
        setattr(self, kind, difference if before is None else max(before, difference))
        self.compared.add(name)


ROWS: dict[tuple[str, str], dict[torch.dtype, Row]] = {}
"""All that was noted in this run, by mechanism and oracle."""


def note(
    mechanism: str, oracle: str, dtype: torch.dtype, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Row:
    """Note the relative difference of every tensor of theirs, "output" or the name of what a gradient is of."""
    row = ROWS.setdefault((mechanism, oracle), {}).setdefault(dtype, Row())
    most = max((largest(x) for name, x in theirs.items() if name != "output"), default=0.0)
    for name, x in theirs.items():
        difference, size = largest(ours[name].double() - x.double()), largest(x)
        if name != "output" and size < 1e-6 * most:
            size = most
        row.note(name, difference / size if size else difference)
    return row


def agree(
    mechanism: str,
    oracle: str,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    limit: float | None = None,
    why: str = "",
) -> None:
    """Assert that the tensors agree, and note by how much.

    Args:
        mechanism: the preset's name where it has one, "deberta (c2p alone)" for a variant, else the class's.
        oracle: whose code, as a reader would look for it: "transformers T5Attention", "timm Attention2d", "loops".
        dtype: of the arithmetic; that of theirs where left out.
        limit: the largest relative difference allowed; `LIMITS` where left out.
        why: why it is wider than `LIMITS`, for the table: a few words without a full stop.
    """
    dtype = theirs["output"].dtype if dtype is None else dtype
    assert set(ours) == set(theirs), f"{sorted(ours)} and {sorted(theirs)}"
    for name, x in theirs.items():
        assert ours[name].shape == x.shape, f"{name}: {tuple(ours[name].shape)}, theirs {tuple(x.shape)}"
        assert not ours[name].isnan().any(), f"{name}: NaN"
    before = ROWS.get((mechanism, oracle), {}).pop(dtype, None)
    row = note(mechanism, oracle, dtype, ours, theirs)
    limit = LIMITS[dtype] if limit is None else limit
    for kind in ("output", "gradient"):
        found = getattr(row, kind)
        assert found is None or found <= limit, f"{mechanism}, {oracle}, {dtype}: {kind} differs by {found:.3g}"
    if before is not None:
        for kind in ("output", "gradient"):
            pair = [x for x in (getattr(before, kind), getattr(row, kind)) if x is not None]
            setattr(row, kind, max(pair, default=None))
        row.compared |= before.compared
        row.why |= before.why
    if why:
        row.why.add(why)


def layers_agree(
    mechanism: str,
    oracle: str,
    ours: Tensor,
    theirs: Tensor,
    leaves: Mapping[str, Tensor],
    own: Mapping[str, Tensor] | None = None,
    *,
    limit: float | None = None,
    why: str = "",
) -> None:
    """`agree` of two outputs and of the gradients of what they grew from, under one random upstream gradient.

    Args:
        leaves: theirs by name: the tokens (or q, k, v) and every parameter.
        own: of these names, what stands in their place with us; the very same tensor where left out.
    """
    own = {} if own is None else own
    assert set(own) <= set(leaves), f"{sorted(own)} and {sorted(leaves)}"
    upstream = torch.randn_like(theirs)
    found, wanted = (with_gradients(*pair, upstream) for pair in ((ours, {**leaves, **own}), (theirs, leaves)))
    agree(mechanism, oracle, found, wanted, limit=limit, why=why)


def with_gradients(output: Tensor, leaves: Mapping[str, Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """The output, and the gradient of every leaf under `upstream`, zeros where nothing depends on one."""
    if not leaves:
        return {"output": output.detach()}
    found = torch.autograd.grad(
        output,
        list(leaves.values()),
        upstream.to(output.dtype),
        allow_unused=True,
        retain_graph=True,  # ours and theirs may share a part
    )
    grads = {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(leaves.items(), found, strict=True)
    }
    return {"output": output.detach(), **grads}


COLUMNS = [
    "mechanism",
    "oracle",
    "output, float64",
    "gradients, float64",
    "output, float32",
    "gradients, float32",
    "gradients of",
    "why no closer",
]


def table() -> str:
    """All that was noted, as Markdown."""

    def cell(rows: Mapping[torch.dtype, Row], dtype: torch.dtype, kind: str) -> str:
        found = getattr(rows[dtype], kind) if dtype in rows else None
        return "" if found is None else "0" if found == 0 else f"{found:.1e}"

    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for (mechanism, oracle), rows in sorted(ROWS.items()):
        cells = [cell(rows, dtype, kind) for dtype in (torch.float64, torch.float32) for kind in ("output", "gradient")]
        gradients = {name for row in rows.values() for name in row.compared} - {"output"}
        why = sorted({reason for row in rows.values() for reason in row.why})
        columns = [mechanism, oracle, *cells, str(len(gradients)) if gradients else "", "; ".join(why)]
        lines.append(f"| {' | '.join(columns)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


HEAD = """# Parity

How far every mechanism is from an oracle: published code run on random weights, or plain loops over pairs of tokens
written from the paper's formula. Each figure is a largest relative difference: the largest absolute difference over the
largest magnitude of the oracle's tensor, over all the cases that the tests run; of the gradients, the worst of q, k, v
(or the tokens) and every parameter, as many tensors as "gradients of" counts over all cases. A gradient that cancels
behind a softmax (below a millionth of the largest) is held against that largest one. An empty cell was not compared:
nothing is learned there, or their code has no such dtype.

Loops run in float64, and what stands under float32 is our float32 against them. Published code under float32 runs as it
is, and both sides round. Under float64 it runs with float64 wherever it says float32 (most of it takes angles or a
softmax in float32 whatever the weights), so that what is left is the difference in what the two compute.

A float64 figure above 1e-11, or a float32 figure above 2e-5, has its reason in the last column.

Made by `python -m pytest tests/position --parity docs/parity.md`, which also asserts every figure; not typed by hand.
"""


HEAD_OF_MODELS = """# Parity of models

The difference between a model of relpos and a published model with the same weights: random weights, every parameter
changed from its initial value, one input. Columns are as in [parity.md](parity.md): largest relative differences of the
scores and of the gradient of every parameter by its name. Under float64, the published code runs in float64 where it
has float32; under float32 it runs unchanged.

Made by `python -m pytest tests/models/test_published_weights.py --parity docs/parity-models.md`, which also asserts
every figure; not typed by hand.
"""


def unmeasured(path: Path) -> list[str]:
    """The rows of a page, each by its first two columns, that this run did not measure."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [tuple(line.strip("| ").split(" | ")[:2]) for line in lines if line.startswith("| ")][1:]
    return [" beside ".join(row) for row in cells if row not in ROWS]


def write(path: Path, versions: Iterable[str]) -> None:
    """The page: what the columns mean, which versions were compared, the table."""
    head = HEAD_OF_MODELS if path.stem.endswith("models") else HEAD
    path.write_text(f"{head}Compared with {', '.join(versions)}.\n\n{table()}", encoding="utf-8")
