"""Random sequences of calls, each held against the reference: whatever is kept between calls is attacked.

    PYTHONPATH=tests:tests/engines python tests/engines/random_calls.py 0:5000
    TRITON_INTERPRET=1 PYTHONPATH=tests:tests/engines python tests/engines/random_calls.py 0:500 triton

The second asks for the engine by its name, where it serves a call.

Between two calls weights change (in place, by `.data`, by an optimizer, by a state dict), mechanisms are copied or
frozen, masks are written to, and a call may come from another thread, in inference mode, under autocast, with other
strides, another dtype, number of threads or class of tensor.
"""

import copy
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import relpos
from relpos import Grid, Mask, Sequence, attention
from relpos.engines.arguments import Arguments
from relpos.engines.reference import REFERENCE
from relpos.engines.unseen import without_unseen

H, D = 2, 8
PLACES = (Sequence(7), Sequence(40), Grid(3, 4), Grid(3, 4, prefix=1))


class Own(Tensor):
    """A tensor of another class."""


def mechanisms(place: Any) -> list[relpos.Mechanism]:
    made: list[relpos.Mechanism] = [
        relpos.T5Bias(H),
        relpos.T5Bias(H, scaled=True),
        relpos.ALiBi(H),
        relpos.ShawPosition(D, 3),
    ]
    prefix, sizes = place.prefix, getattr(place, "sizes", (place.count,))
    table = {"window_size": sizes} if len(sizes) == 2 else {"seq_len": sizes[0]}
    made.append(relpos.RelativePositionBias(H, **table, prefix=prefix))
    made.append(relpos.RotaryEmbedding(D) + relpos.T5Bias(H, scaled=True))
    return made


def masks(count: int) -> list[Any]:
    segments = torch.randint(0, 3, (count,)).sort().values
    return [None, None, "causal", Mask.window(3, 2), Mask.packed(segments), Mask.padding(torch.rand(2, count) < 0.8),
            torch.rand(count, count) < 0.7]  # fmt: skip


def change(mechanism: relpos.Mechanism, mask: Any, chance: random.Random) -> relpos.Mechanism:
    """Something that a person may do between two calls."""
    weights = list(mechanism.parameters())
    what = chance.randrange(9)
    with torch.no_grad():
        if what == 0:
            for x in weights:
                x.add_(torch.randn_like(x))
        elif what == 1:
            for x in weights:
                x.data = torch.randn_like(x)
        elif what == 2:
            weights_of = dict(mechanism.named_parameters())
            state = mechanism.state_dict()
            mechanism.load_state_dict({name: x.clone() + (name in weights_of) for name, x in state.items()})
    if what == 3 and any(x.requires_grad for x in weights):
        for x in weights:
            x.grad = torch.ones_like(x)
        torch.optim.SGD(weights, lr=0.1).step()
    elif what == 4:
        return copy.deepcopy(mechanism)
    elif what == 5:
        mechanism.requires_grad_(chance.random() < 0.5)
    elif what == 6:
        mechanism.to(chance.choice([torch.float32, torch.float64, torch.bfloat16]))
    elif what == 7 and isinstance(mask, Mask) and mask.query_segments is not None:
        mask.query_segments.copy_(mask.query_segments.roll(1))
    elif what == 8:
        torch.set_num_threads(chance.choice([1, 2]))
    return mechanism


ASPECTS: dict[str, list[Any]] = {
    **{f"layout of {name}": [0, 0, 1, 2, 3, 4] for name in "qkv"},
    **{f"gradient of {name}": [True, False] for name in "qkv"},
    "dtype": [torch.float32, torch.float32, torch.float64, torch.bfloat16],
    "mode": [nullcontext, nullcontext, torch.no_grad, torch.inference_mode],
    "autocast": [False, False, True],
    "scale": [None, 0.2, 1.0],
    "one tensor": [False, False, True],
    "class": [False, False, True],
    "backend": ["auto", "auto", "streaming", "sdpa"],
    "thread": [False, True],
}
"""What of a call may differ from the one before, which differs in little else."""


def heads(name: str, count: int, how: dict[str, Any]) -> Tensor:
    """Queries, keys or values."""
    x, layout = torch.randn(2, H, count, D, dtype=how["dtype"]), how[f"layout of {name}"]
    if layout == 1:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == 2:
        x = x.mT.contiguous().mT
    elif layout == 3:
        x = torch.randn(2, H, count, 2 * D, dtype=how["dtype"])[..., ::2]
    elif layout == 4:
        x = x[:1].expand(2, -1, -1, -1)
    return x.requires_grad_(how[f"gradient of {name}"])


def compare(ours: list[Tensor], theirs: list[Tensor], loose: bool) -> None:
    for a, b in zip(ours, theirs, strict=True):
        near = {"rtol": 5e-2, "atol": 5e-2} if loose else {"rtol": 2e-4, "atol": 2e-5}
        torch.testing.assert_close(a.double(), b.double(), **near)


def one_call(mechanism: relpos.Mechanism, place: Any, how: dict[str, Any]) -> None:
    backend, mask = sys.argv[2] if len(sys.argv) > 2 else how["backend"], how["mask"]
    if (backend == "streaming" and isinstance(mask, Tensor)) or (
        backend == "sdpa" and isinstance(mechanism, relpos.ShawPosition)
    ):
        backend = "auto"
    q, k, v = (heads(name, place.count, how) for name in "qkv")
    if how["one tensor"]:
        k = v = q
    elif how["class"]:
        q = q.detach().as_subclass(Own)
    given = {"position": mechanism, "queries": place, "mask": mask, "scale": how["scale"]}
    if len(sys.argv) > 2 and not serves(backend, (q, k, v), given, how):
        backend = "auto"
    found: list[list[Tensor]] = []
    leaves = [x for x in {id(x): x for x in (q, k, v, *mechanism.parameters())}.values() if x.requires_grad]
    for compute in (partial(attention, backend=backend), by_definition):
        with how["mode"](), torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
            out = compute(q, k, v, **given)
        found.append([out.detach().as_subclass(Tensor)])
        if out.requires_grad:
            upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
            gradients = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
            found[-1] += [torch.zeros(()) if x is None else x.as_subclass(Tensor) for x in gradients]
    half = torch.bfloat16 in (how["dtype"], *(x.dtype for x in mechanism.parameters()))
    compare(*found, how["autocast"] or half)


def serves(backend: str, tensors: tuple[Tensor, ...], given: dict[str, Any], how: dict[str, Any]) -> bool:
    """Whether an engine serves a call."""
    try:
        with how["mode"](), torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
            relpos.explain(*tensors, **given, backend=backend)
    except NotImplementedError:
        return False
    return True


def by_definition(*tensors: Tensor, **given: Any) -> Tensor:
    """What the reference says, without a plan."""
    call = Arguments(*tensors, **given).call()
    with torch.autocast("cpu", enabled=False):
        return REFERENCE.run(without_unseen(call))[0]


def sequence(seed: int, calls: int = 12) -> None:
    """A sequence of calls and of what happens between them. Raises where one is wrong."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    place = chance.choice(PLACES)
    mechanism, aspects = chance.choice(mechanisms(place)), ASPECTS | {"mask": masks(place.count)}
    how = {name: chance.choice(choices) for name, choices in aspects.items()}
    for _ in range(calls):
        try:
            if how["thread"]:
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(one_call, mechanism, place, how).result()
            else:
                one_call(mechanism, place, how)
        except Exception as error:
            raise AssertionError(f"sequence {seed}: {mechanism}, {how}: {error}") from error
        mechanism = change(mechanism, how["mask"], chance)
        aspect = chance.choice(list(aspects))
        how = how | {aspect: chance.choice(aspects[aspect])}


def main() -> int:
    first, last = map(int, sys.argv[1].split(":"))
    wrong = 0
    for seed in range(first, last):
        try:
            sequence(seed)
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
    print(f"{last - first} sequences, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
