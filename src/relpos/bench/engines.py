"""Compare every engine of this machine with the reference: output and gradients of small calls of every kind.

A call is a `CallKind` in a dtype: a few hundred tokens that mostly fill no whole tile, every kind of term and mask, and
learned tables of random numbers. `engines.self_check.agreement` defines the rule. Calls that an engine does not support
are left out and listed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.bench.check import first_line
from relpos.bench.run import surroundings
from relpos.core import (
    Blocks,
    Coordinates,
    DenseBias,
    Grid,
    IndexedBias,
    LowRank,
    Mask,
    Positions,
    QueryScale,
    Sequence,
    Sinks,
    Softcap,
    Term,
    Terms,
)
from relpos.core.checks import require_name
from relpos.engines.api import difference, expected
from relpos.engines.arguments import Arguments
from relpos.engines.call import Call
from relpos.engines.selection import backends
from relpos.engines.self_check.agreement import Difference
from relpos.position import (
    CoPE,
    DecomposedPosition,
    DisentangledPosition,
    Mechanism,
    PolarEmbedding,
    RelativePositionBias,
    ReRoPE,
    RotaryEmbedding,
    ShawPosition,
    T5Bias,
    TransformerXLPosition,
    TUPEPosition,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOKENS = {"cpu": 139, "cuda": 299}
"""The approximate number of tokens in a call."""
_HEADS, _WIDTH = 2, 64
_STD = 0.2
"""The standard deviation of learned tables: a wrong row is visible, and the softmax keeps more than one key."""


@dataclass(frozen=True, eq=False)
class CallKind:
    """A kind of call.

    Attributes:
        name: a few words.
        position: makes the position; None for no position.
        queries, keys: coordinates of the tokens; keys default to the queries.
        mask: or None. shared: whether query heads share key heads. dropout: probability. width: width of a head.
    """

    name: str
    position: Callable[[], Mechanism | Terms | Term] | None
    queries: Coordinates
    keys: Coordinates | None = None
    mask: Mask | None = None
    shared: bool = False
    dropout: float = 0.0
    width: int = _WIDTH


def kinds(n: int) -> tuple[CallKind, ...]:
    """All kinds of calls, with about n tokens."""
    line, full = Sequence(n), Sequence(n // 128 * 128 + 128)
    size = int(n**0.5)
    token = torch.arange(n)

    def table(length: int = n, prefix: int = 0) -> Callable[[], Mechanism]:
        return lambda: RelativePositionBias(_HEADS, seq_len=length, prefix=prefix)

    def sinks() -> Terms:
        return Sinks(torch.zeros(_HEADS, requires_grad=True)) + Softcap(3.0)

    def indexed() -> Term:
        return IndexedBias(torch.zeros(_HEADS, 7, requires_grad=True), (token[:, None] * token % 7).byte()[None])

    def low_rank() -> Terms:
        pairs = [(_HEADS, n, 4), (1, n, 4)], [(2, 1, n, 2), (1, _HEADS, n, 2)]
        return Terms(*(LowRank(*(torch.zeros(shape, requires_grad=True) for shape in pair)) for pair in pairs))

    segments = torch.where(token < n - 9, token * 4 // n, -1)
    some = Mask(left=n // 4, right=3, query_global=token < 2, key_global=token < 2)
    blocks = Mask(blocks=Blocks((torch.arange(-(-n // 16))[:, None] + torch.arange(-(-n // 16)))[None] % 3 > 0, 16))
    irregular = Positions(token * 17 % n, low=0, high=n - 1)
    return (
        CallKind("no position", None, line),
        CallKind("causal, width 128, full tiles", None, full, mask=Mask.causal(), width=128),
        CallKind("1-D bias", table(), line),
        CallKind("1-D bias, full tiles", table(full.count), full),
        CallKind("1-D bias, causal, prefix", table(prefix=3), Sequence(n, prefix=3), mask=Mask.causal()),
        CallKind("1-D bias, window", table(), line, mask=Mask.window(n // 3, 5)),
        CallKind("1-D bias, segments, padding", table(), line, mask=Mask.packed(segments)),
        CallKind("1-D bias, global tokens", table(), line, mask=some),
        CallKind("1-D bias, blocks", table(), line, mask=blocks),
        CallKind("1-D bias, dropout", table(), line, dropout=0.2),
        CallKind("1-D bias, shared keys", table(), line, shared=True),
        CallKind("1-D bias, width 128", table(), line, width=128),
        CallKind("buckets, other queries", lambda: T5Bias(_HEADS, scaled=True), Sequence(n // 2, start=n // 3), line),
        CallKind("buckets, irregular positions", lambda: T5Bias(_HEADS, scaled=True), irregular),
        CallKind(
            "2-D bias, prefix",
            lambda: RelativePositionBias(_HEADS, window_size=(size, size), prefix=1),
            Grid(size, size, prefix=1),
        ),
        CallKind("2-D bias, windows", lambda: RelativePositionBias(_HEADS, window_size=(7, 7)), Grid(7, 7)),
        CallKind("rotation", lambda: RotaryEmbedding(_WIDTH), line),
        CallKind("rotation by pair", lambda: ReRoPE(RotaryEmbedding(_WIDTH), window=n // 3), line, mask=Mask.causal()),
        CallKind("magnitudes and angles", lambda: PolarEmbedding(_HEADS, _WIDTH), line),
        CallKind(
            "rotation and buckets",
            lambda: RotaryEmbedding(_WIDTH) + T5Bias(_HEADS, scaled=True),
            line,
            mask=Mask.causal(),
        ),
        CallKind("sinks, soft cap", sinks, line),
        CallKind("a factor of each query", lambda: QueryScale(torch.linspace(1, 2, n)[None, None]), line),
        CallKind("Shaw's vectors", lambda: ShawPosition(_WIDTH), line),
        CallKind("DeBERTa's vectors", lambda: DisentangledPosition(_HEADS, _WIDTH, 32), line),
        CallKind("Transformer-XL's vectors", lambda: TransformerXLPosition(_HEADS, _WIDTH, 32), line),
        CallKind("MViTv2's vectors", lambda: DecomposedPosition(_WIDTH, (size, size)), Grid(size, size)),
        CallKind("TUPE's products", lambda: TUPEPosition(_HEADS, _WIDTH, 32, seq_len=n), line),
        CallKind("biases of low rank", low_rank, line, mask=Mask.causal(), shared=True),
        CallKind("CoPE's rule", lambda: CoPE(_WIDTH), line, mask=Mask.causal()),
        CallKind("bias of all pairs", lambda: DenseBias(torch.zeros(1, _HEADS, n, n, requires_grad=True)), line),
        CallKind("bias by an index of each pair", indexed, line),
    )


def make(kind: CallKind, dtype: torch.dtype) -> Call:
    """A call of a kind on the CPU, with the same random numbers in every process."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    keys = kind.queries if kind.keys is None else kind.keys
    shared = 2 if kind.shared else 1
    q = normal(2, _HEADS, kind.queries.count, kind.width)
    k, v = (normal(2, _HEADS // shared, keys.count, kind.width) for _ in range(2))
    position = _position(kind, dtype, generator)
    call = Arguments(q, k, v, position=position, mask=kind.mask, dropout=kind.dropout).call()
    return replace(call, seed=torch.tensor(12345) if kind.dropout else None)


def _position(kind: CallKind, dtype: torch.dtype, generator: torch.Generator) -> Terms | None:
    """The terms of a kind, with random values for parameters; in float64 if the call is."""
    if kind.position is None:
        return None
    with torch.random.fork_rng(devices=[]):
        made = kind.position()
    if isinstance(made, Mechanism):
        for parameter in made.parameters():
            parameter.data.normal_(0, _STD, generator=generator)
        made = made.terms(kind.queries, kind.keys)

    def leaf(x: Tensor) -> Tensor:
        copy = x.detach().double() if dtype == torch.float64 and x.is_floating_point() else x.detach().clone()
        if x.is_leaf and x.requires_grad:  # a parameter without a mechanism
            copy.normal_(0, 1, generator=generator)
        return copy.requires_grad_(x.requires_grad)

    terms: Terms = pytree.tree_map_only(Tensor, leaf, made if isinstance(made, Terms) else Terms(made))
    return terms


@dataclass(frozen=True)
class EngineRow:
    """The result of one engine for one kind of call in one dtype.

    Attributes:
        found: the difference to the reference; None if the engine does not support the call or raised.
        lack: the missing feature. raised: the error, in one line.
    """

    device: str
    engine: str
    dtype: str
    kind: str
    found: Difference | None = None
    lack: str | None = None
    raised: str | None = None

    @property
    def fault(self) -> str | None:
        """The fault, or None."""
        return self.raised if self.found is None else self.found.fault


def devices() -> tuple[torch.device, ...]:
    """The CPU and every GPU."""
    return (torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count())))


def engines(named: str | None = None) -> tuple[str, ...]:
    """The engines in a comma-separated list; by default all except the reference, which counts as correct.

    Raises:
        ValueError: no engine has this name.
    """
    every = [name for name in backends() if name != "reference"]
    if named is None:
        return tuple(every)
    asked = [name.strip() for name in named.split(",") if name.strip()]
    for name in asked or [named]:
        require_name(name, every, "an engine")
    return tuple(dict.fromkeys(asked))


def check(
    asked: Many[str],
    *,
    only: Many[torch.device] | None = None,
    dtypes: Many[torch.dtype] | None = None,
    part: slice = slice(None),
) -> Iterator[EngineRow]:
    """Compare the engines with the reference, one row per kind of call, on all devices of this machine or on `only`.

    Args:
        dtypes: by default all. part: a slice of the kinds of calls.
    """
    for device in devices() if only is None else only:
        every = kinds(TOKENS[device.type])[part]
        for dtype in DTYPES if dtypes is None else dtypes:
            for kind in every:
                wanted = expected(lambda kind=kind, dtype=dtype: make(kind, dtype))  # type: ignore[misc]
                for engine in asked:
                    names = str(device), engine, str(dtype).removeprefix("torch."), kind.name
                    if engine == "sdpa" and kind.dropout:
                        yield EngineRow(
                            *names, lack="dropout with the random numbers of the other engines: it uses PyTorch's"
                        )
                        continue
                    try:
                        yield EngineRow(*names, found=difference(engine, wanted, device))
                    except NotImplementedError as error:
                        yield EngineRow(*names, lack=str(error))
                    except Exception as error:
                        yield EngineRow(*names, raised=first_line(error))


def count(asked: Many[str], *, only: Many[torch.device] | None = None) -> int:
    """The number of rows that `check` yields."""
    wanted = devices() if only is None else only
    return sum(len(kinds(TOKENS[device.type])) * len(DTYPES) * len(asked) for device in wanted)


def versions() -> str:
    """Versions and hardware, line by line."""
    about = surroundings("cuda" if torch.cuda.is_available() else "cpu")
    names = ("relpos", "torch", "triton", "python")
    lines = [", ".join(f"{name} {about[name]}" for name in names), about["platform"]]
    lines.append(f"cpu: {about['processor']}, {about['cores']} cores, {about['capability']}")
    lines += [f"{device}: {torch.cuda.get_device_name(device)}" for device in devices()[1:]]
    if torch.cuda.is_available():
        lines.append(f"CUDA {about['cuda']}, driver {about['driver']}")
    return "\n".join(lines)


def render(rows: Many[EngineRow], *, every: bool = False) -> str:
    """Versions, Markdown tables, differences and calls left out, to paste into an issue; 80 columns.

    Args:
        every: one table per engine and dtype with a line for each kind of call, instead of one line per engine and
            dtype.
    """
    heads = ["output", "gradient", "verdict", "time"]
    table, tables = [["engine", "on", "dtype", "calls", *heads]], []
    for names, group in groupby(sorted(rows, key=_order), key=lambda row: (row.engine, row.device, row.dtype)):
        ran = [row for row in group if row.lack is None]
        if ran:
            table.append([*names, str(len(ran)), *_summary(ran)])
            lines = [["call", *heads], *([row.kind, *_summary([row])] for row in ran)]
            tables.append(f"{', '.join(names)}\n\n{_draw(lines)}")
    parts = [versions(), *(tables if every else [_draw(table)]), _explained(rows)]
    return "\n\n".join(part for part in parts if part)


def _summary(rows: Many[EngineRow]) -> list[str]:
    """The largest differences of output and gradients, the verdict, and the time."""
    differences = [row.found for row in rows if row.found is not None]
    far = [
        f"{max(x):.1e}" if x else ""
        for x in ([one.output for one in differences], [one.gradients for one in differences])
    ]
    wrong = sum(row.fault is not None for row in rows)
    verdict = "agrees" if not wrong else "DIFFERS" if len(rows) == 1 else f"{wrong} differ"
    seconds = sum(one.seconds for one in differences)
    return [*far, verdict, f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"]


def _draw(table: list[list[str]]) -> str:
    wide = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [table[0], ["-" * width for width in wide], *table[1:]]
    return "\n".join("| " + " | ".join(x.ljust(w) for x, w in zip(line, wide, strict=True)) + " |" for line in lines)


def _order(row: EngineRow) -> tuple[int, str, int]:
    """A sort key: engine, in the order that `auto` tries them, then device and dtype."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    return list(backends()).index(row.engine), row.device, dtypes.index(row.dtype)


def _explained(rows: Many[EngineRow]) -> str:
    """The differences, and the calls that each engine left out."""
    lines = [f"{row.engine}, {row.device}, {row.dtype}, {row.kind}: {row.fault}" for row in rows if row.fault]
    lacks: dict[tuple[str, str], list[str]] = {}
    ran = {(row.engine, row.device) for row in rows if row.lack is None}
    for row in rows:
        known = lacks.setdefault((row.engine, row.device), [])
        if row.lack is not None and row.lack not in known:
            known.append(row.lack)
    for (engine, device), reasons in lacks.items():
        if reasons:
            left_out = "left out" if (engine, device) in ran else "not run"
            lines.append(f"{engine}, {device}, {left_out}, not supported: {'; '.join(reasons)}")
    return "\n".join(textwrap.fill(f"- {one}", 80, subsequent_indent="  ", break_long_words=False) for one in lines)
