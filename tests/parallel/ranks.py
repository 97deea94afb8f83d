"""What a few processes do for `test_context_attention`: each is one rank, and writes what it found into a file."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import relpos
from covering import pairwise
from relpos import Mask, Sequence
from relpos.parallel import average_gradients, context_attention, context_parallel, ring_schedule, shard, unshard

seed = torch.default_generator.manual_seed  # torch's own call writes down a stack for each device that never starts
N, HEADS, WIDTH, STATES = 16, 4, 8, 12
METHODS = [(method, layout) for method in ("gather", "ring", "ulysses") for layout in ("contiguous", "zigzag")]
DOCUMENTS = torch.tensor([0] * 5 + [1] * 6 + [2] * 3 + [-1] * 2)  # across the borders of shards, and padding
MASKS: dict[str, Any] = {
    "none": None,
    "causal": "causal",
    "window": Mask.window(3, 2),
    "causal window": Mask.window(4, 0),
    "packed": Mask.causal() & Mask.packed(DOCUMENTS),
    "padded": Mask.padding(torch.arange(N) < torch.tensor([[11], [N]])),
    "blocks": Mask(blocks=relpos.Blocks(torch.eye(4, dtype=torch.bool)[None].roll(1, 2), 5)),  # cut by shards
    "globals": Mask(left=2, right=2, key_global=torch.arange(N) == 3, query_global=torch.arange(N) == 3),
}


def positions() -> dict[str, Any]:
    """Mechanisms, each with coordinates of its own."""
    seed(1)
    line, std = Sequence(N), {"init_std": 0.5}
    restarting = torch.cat([torch.arange(5), torch.arange(6), torch.arange(5)])
    cos = torch.rand(1, 1, N, WIDTH // 2, dtype=torch.float64)
    terms = relpos.Rotation(cos, cos, layout="half", values=True) + relpos.Softcap(3.0)
    terms += relpos.Sinks(torch.randn(HEADS, dtype=torch.float64, requires_grad=True))
    terms += relpos.QueryScale(torch.rand(1, 1, N, dtype=torch.float64) + 0.5, on="scores")
    terms += relpos.DenseBias(torch.randn(1, HEADS, N, N, dtype=torch.float64, requires_grad=True))
    angles = torch.randn(1, 1, N, WIDTH // 2, dtype=torch.float64, requires_grad=True)
    near, far = (relpos.Rotation(angles, key, layout="half") for key in (angles, angles.detach() * 2))
    by_pair = relpos.PairRotations((far, near), (Mask(right=-4), Mask(left=3)))  # the first has no keys for some rows
    by_pair += relpos.Sinks(torch.randn(HEADS, dtype=torch.float64, requires_grad=True))
    yarn = relpos.RotaryEmbedding(WIDTH, scaling=relpos.YaRN(factor=4, trained_length=4))
    of = {
        "none": (None, None),
        "t5": (relpos.T5Bias(HEADS, **std), relpos.Positions(restarting, low=0, high=15)),
        "t5 causal": (relpos.T5Bias(HEADS, bidirectional=False, **std), Sequence(N - 1, prefix=1)),
        "relative 2d": (relpos.RelativePositionBias(HEADS, window_size=(4, 4), **std), relpos.Grid(4, 4)),
        "alibi": (relpos.ALiBi(HEADS), line),
        "rope": (relpos.RotaryEmbedding(WIDTH), line),
        "shaw": (relpos.RotaryEmbedding(WIDTH) + relpos.ShawPosition(WIDTH, **std), line),
        "transformer_xl": (relpos.TransformerXLPosition(HEADS, WIDTH, 16), line),
        "deberta": (relpos.DisentangledPosition(HEADS, WIDTH, 16, span=4, max_distance=8), line),
        "rerope": (relpos.ReRoPE(yarn, 4), line),
        "dual_chunk": (relpos.DualChunk(relpos.RotaryEmbedding(WIDTH), 6, 2), Sequence(N - 1, prefix=1)),
        "randomized": (relpos.RandomizedPositions(relpos.RotaryEmbedding(WIDTH), 64), line),
        "cope": (relpos.CoPE(WIDTH, **std), line),
        "fire": (relpos.FIREBias(HEADS), line),
        "fox": (relpos.ForgetGate(HEADS, STATES, **std), line),
        "inkling": (relpos.InklingBias(HEADS, STATES, extent=6, **std), line),
        "by pair": (by_pair, None),
        "terms": (terms, None),
    }
    return {name: (one.double() if isinstance(one, torch.nn.Module) else one, at) for name, (one, at) in of.items()}


def weights_of(position: Any) -> list[Tensor]:
    """What a position learns."""
    if isinstance(position, torch.nn.Module):
        return list(position.parameters())
    leaves = [] if position is None else torch.utils._pytree.tree_leaves(position)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def inputs(groups: int, width: int = WIDTH, n: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, states and the output's gradient, the same on all ranks: `[B, tokens, ...]`."""
    seed(2)
    heads = ((HEADS, width), (HEADS // groups, width), (HEADS // groups, width))
    found = [torch.randn(2, n, *each, dtype=dtype) for each in heads]
    return [*found, torch.randn(2, n, STATES, dtype=dtype), torch.randn(2, n, HEADS, width, dtype=dtype)]


def attend(
    attention: Callable[..., Tensor], position: Any, tokens: Any, given: list[Tensor], **options: Any
) -> list[Tensor]:
    """Output and gradients of q, k, v, states and weights. Heads are not contiguous, as after a projection."""
    q, k, v, states, upstream = given
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, states)]
    if tokens is not None:
        options |= {"queries": tokens}
    if getattr(position, "needs_states", False):
        options |= {"states": leaves[3]}
    out = attention(*(x.transpose(1, 2) for x in leaves[:3]), position=position, **options)
    wanted = [*leaves, *weights_of(position)]
    found = torch.autograd.grad((out.transpose(1, 2) * upstream).sum(), wanted, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    return [out.transpose(1, 2), *gradients]


def difference(mesh: Any, whole: list[Tensor], share: list[Tensor], layout: str) -> float:
    """How far a share's output and gradients are from one process's; of weights, the sum over ranks. NaN if any is."""
    most = torch.zeros((), dtype=torch.float64)
    for index, (x, y) in enumerate(zip(whole, share, strict=True)):
        if index < 5:
            x = shard(x, mesh, layout=layout)
        else:
            y = y.clone()
            dist.all_reduce(y)
        if x.numel():
            most = most.maximum((x - y).detach().abs().max())
    return float(most)


def compare(mesh: Any) -> Iterator[tuple[str, Any]]:
    """Cases by name: the difference from one process, or what refuses them."""
    known = positions()
    rows = pairwise(list(known), [name for name in MASKS if name != "blocks"], METHODS, (1, 2))
    of_four = [row for row in rows if row[2][0] != "gather"][::3]  # what differs there is who sends what
    if dist.get_world_size() > 2:
        rows = of_four
    else:
        rows = [row for row in rows if row not in of_four]
        rows += [(name, "causal", ("auto", "zigzag"), 1) for name in ("rope", "rerope", "cope", "fox", "terms")]
        rows += [("t5", "blocks", ("auto", "zigzag"), 1)]
    for name, mask, (method, layout), groups in rows:
        position, tokens = known[name]
        if name == "terms" and method == "ulysses":
            groups = 1
        given = inputs(groups)
        options = {"mask": MASKS[mask]}
        case = f"{name}, {mask}, {method}, {layout}, {groups}"
        parts = [shard(x, mesh, layout=layout) for x in given]
        seed(3 + dist.get_rank())  # one process draws what the first rank draws
        try:
            share = attend(
                context_attention, position, tokens, parts, mesh=mesh, method=method, layout=layout, **options
            )
        except NotImplementedError as error:
            yield case, str(error)
            continue
        seed(3)
        whole = attend(relpos.attention, position, tokens, given, backend="reference", **options)
        yield case, difference(mesh, whole, share, layout)


def in_blocks(mesh: Any) -> Iterator[tuple[str, Any]]:
    """A ring of several blocks a share, in float32 and bfloat16, whose kernels are others; and its bits."""
    seed(6)
    bias, n = relpos.T5Bias(HEADS, bidirectional=False, init_std=0.5), 512
    options = {"mask": "causal", "mesh": mesh, "method": "ring", "layout": "zigzag"}
    for dtype in (torch.float32, torch.bfloat16):
        given = inputs(1, 16, n, dtype)
        parts = [shard(x, mesh, layout="zigzag") for x in given]
        once, again = (attend(context_attention, bias, Sequence(n), parts, **options) for _ in range(2))
        yield f"bits, {dtype}", all(torch.equal(x, y) for x, y in zip(once, again, strict=True))
        whole = attend(relpos.attention, bias, Sequence(n), [x.double() for x in given], mask="causal")
        yield f"blocks, {dtype}", difference(mesh, whole, once, "zigzag")


def repeated(mesh: Any) -> Iterator[tuple[str, bool]]:
    """Whether a second call has the same bits: output, gradients, and those of weights summed over ranks."""
    known, parts = positions(), [shard(x, mesh, layout="zigzag") for x in inputs(1)]
    for name in ("t5", "fox"):
        for method in ("gather", "ring", "ulysses"):
            options, twice = {"mask": "causal", "mesh": mesh, "method": method, "layout": "zigzag"}, []
            for _ in range(2):
                found = attend(context_attention, *known[name], parts, **options)
                weights = [torch.nn.Parameter(torch.zeros_like(x)) for x in found[5:]]
                for weight, gradient in zip(weights, found[5:], strict=True):
                    weight.grad = gradient.clone()
                average_gradients(weights, mesh)
                twice.append([*found, *(weight.grad for weight in weights)])
            yield f"{name}, {method}", all(torch.equal(x, y) for x, y in zip(*twice, strict=True))


def blind(mesh: Any) -> Iterator[tuple[str, Any]]:
    """Ranks whose queries see nothing take part in the backward, and their weights get a gradient of 0."""
    few = Mask.padding(torch.arange(N) < torch.tensor([[3], [4]]))
    known, given = positions(), inputs(1)
    parts = [shard(x, mesh) for x in given]
    for name in ("fox", "t5 causal"):
        whole = attend(relpos.attention, *known[name], given, mask=few, backend="reference")
        share = attend(context_attention, *known[name], parts, mask=few, mesh=mesh, method="ring")
        yield name, difference(mesh, whole, share, "contiguous")
    q, k, v = (x.transpose(1, 2) for x in parts[:3])
    bias, tokens = known["t5"]
    context_attention(q, k, v, position=bias, queries=tokens, mask=few, mesh=mesh, method="ring").sum().backward()
    yield "weights alone", float(weights_of(bias)[0].grad.abs().max()) if dist.get_rank() else 0.0


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "language": lambda: relpos.LanguageModel(
        11,
        16,
        16,
        depth=2,
        num_heads=4,
        position="t5+fox+rotary_randomized",
        shared_position=True,
        position_init_std=0.5,
    ),
    "image": lambda: relpos.VisionTransformer(
        8, 2, 1, 3, "avg", 16, 2, 4, class_token=False, position="learned+relative_2d", position_init_std=0.5
    ),
    "layer": lambda: relpos.MultiHeadAttention(16, 4, position=relpos.RotaryEmbedding(4)),
}


def in_models(mesh: Any) -> Iterator[tuple[str, Any]]:
    """How far outputs and gradients of models whose sequences are spread are from those of whole ones."""
    seed(3)
    tokens, labels = torch.randint(11, (2, 2, 16))
    given = {"language": tokens, "image": torch.randn(2, 1, 8, 8).double(), "layer": torch.randn(2, 16, 16).double()}
    for index, (name, make) in enumerate(MODELS.items()):
        layouts = ("contiguous", "zigzag")
        for layout in layouts if dist.get_world_size() == 2 else layouts[index % 2 :][:1]:
            seed(4)
            model, x = make().double(), given[name]

            def loss(out: Tensor, labels: Tensor) -> Tensor:
                if out.dim() == 3 and out.shape[2] == 11:
                    return torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
                return out.square().mean()

            seed(5)
            whole = model(x)
            wanted = torch.autograd.grad(loss(whole, labels), list(model.parameters()), allow_unused=True)
            spread = context_parallel(model, mesh, method="ring", layout=layout)
            seed(5 + dist.get_rank())
            out = spread(shard(x, mesh, layout=layout) if name == "layer" else x)
            loss(out, shard(labels, mesh, layout=layout)).backward()
            average_gradients(spread, mesh)
            whole = whole if name == "image" else shard(whole, mesh, layout=layout)
            pairs = [(x.grad, g) for x, g in zip(model.parameters(), wanted, strict=True) if g is not None]
            apart = torch.stack([(x - y).detach().abs().max() for x, y in [(out, whole), *pairs]])
            yield f"{name}, {layout}", float(apart.max())


def refused(mesh: Any) -> Iterator[tuple[str, str]]:
    """What is said on this rank where a call is refused."""
    rank = dist.get_rank()
    bias, cope = relpos.T5Bias(HEADS), relpos.CoPE(WIDTH)

    def call(tokens: int = 4, **options: Any) -> str:
        q = torch.randn(1, HEADS, tokens, WIDTH)
        try:
            context_attention(q, q, q, **{"mesh": mesh, **options})
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    whole = Sequence(4 * dist.get_world_size())
    yield "unequal", call(4 + 2 * (rank == 1))
    yield "unequal, beside coordinates", call(4 + 2 * (rank == 1), position=bias, queries=whole)
    yield "empty", call(0)
    yield "empty on one rank", call(4 * (rank == 0))
    yield "another method", call(method="gather" if rank else "ring")
    yield "dropout", call(dropout=0.1)
    yield "a rule of rows", call(position=cope, queries=whole, method="ring")
    yield "heads", call(position=None, method="ulysses") if HEADS % dist.get_world_size() else "nothing"
    yield "a mask of few tokens", call(mask=torch.ones(4, 4, dtype=torch.bool))
    half = Mask.window(3, 0) if rank else "causal"
    yield "another mask", call(mask=half)
    yield "other tokens", call(position=bias, queries=Sequence(whole.count, start=rank))
    mine = relpos.T5Bias(HEADS).requires_grad_(rank == 0)
    yield "a frozen weight on one rank", call(position=mine, queries=whole)
    share = relpos.DenseBias(torch.zeros(1, HEADS, 4, 4))
    yield "terms of a share", call(position=share)
    yield "more terms of a share", call(terms=share, method="gather")
    inkling = relpos.InklingBias(HEADS, STATES, extent=6)
    yield "states of all tokens", call(position=inkling, queries=whole, states=torch.zeros(1, whole.count, STATES))
    yield (
        "no states on one rank",
        call(position=inkling, queries=whole, states=torch.zeros(1, 4, STATES) if rank else None),
    )
    blocks = Mask(blocks=relpos.Blocks(torch.ones(1, *[-(-whole.count // 3)] * 2, dtype=torch.bool), 3))
    yield "a block of two ranks", call(mask=blocks, method="gather")
    yield "a block of two ranks, automatically", call(mask=blocks)


def run(folder: str) -> None:
    """One rank's findings, as `rank.json` in the folder."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "context"))["context"]
    found: dict[str, Any] = {"refused": dict(refused(mesh)), "blocks": {}, "repeated": {}}
    if size > 2:
        found["blocks"] = dict(in_blocks(mesh))
    ring_schedule._LEAST = 1 if size == 2 else 2  # several blocks of few tokens; of two ranks, smaller ones backward
    if size > 2:  # a sum of two is the same in either order
        found["repeated"] = dict(repeated(mesh))
    found["blind"] = dict(blind(mesh))
    found["compared"], found["models"] = dict(compare(mesh)), dict(in_models(mesh))
    x = torch.arange(2 * N).view(2, N)
    found["unshard"] = all(
        torch.equal(unshard(shard(x, mesh, layout=layout), mesh, layout=layout), x)
        for layout in ("contiguous", "zigzag")
    )
    layer = torch.nn.Linear(3, 2)
    layer.weight.grad = torch.full((2, 3), float(rank))
    average_gradients(layer, mesh)
    found["average"] = [layer.weight.grad.tolist(), layer.bias.grad]
    if rank == 0:  # the others have ended
        q = torch.randn(1, HEADS, 4, WIDTH)
        dist.barrier()
        try:
            for _ in range(100):
                context_attention(q, q, q, mesh=mesh)
        except ConnectionError as error:
            found["lost"] = str(error)
    else:
        dist.barrier()
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1])
