"""What a rebuilding must not change, as numbers: two of each tensor, its norm and a fixed mixture of its entries.

    python tests/frozen/freeze.py [NAME ...]        writes NAME.json beside this file; by default all three

The calls are the fuzzer's, of fixed seeds, through every engine that serves them, outputs and gradients; the models are
small ones with each mechanism. Whether the numbers are right is asked elsewhere: here it is asked that they stay.
"""

import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import relpos  # noqa: E402
from fuzz.building import build  # noqa: E402
from fuzz.drawing import draw_as_frozen as draw  # noqa: E402
from fuzz.running import ENGINES, NOT_SERVED, run  # noqa: E402
from fuzz.tiles import set_to  # noqa: E402
from relpos.position import presets  # noqa: E402

CALLS, INTERPRETED = 200, 10
Print = tuple[str, float, float]
"""A tensor's dtype, norm and mixture."""


def fingerprint(x: Tensor) -> Print:
    """Of a tensor; an entry that is inf or nan counts as a number of its own."""
    flat = torch.nan_to_num(x.detach().double(), nan=7e3, posinf=8e3, neginf=-9e3).flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).mul_(0.7548776662466927).frac_().sub_(0.5)
    digits = 17 if x.dtype == torch.float64 else 9
    kept = (float(f"{float(one):.{digits}g}") for one in (flat.norm(), flat @ weights))
    return (str(x.dtype).removeprefix("torch."), *kept)  # type: ignore[return-value]


ALLOWED = {"bfloat16": (1, 1 / 2), "float16": (1, 1 / 64), "float32": (128, 16), "float64": (128, 16)}
"""By the coarsest dtype of a call, in its eps: what a tensor may differ by, of its own norm and of the call's largest.

Norm and mixture average the rounding of half precision, so that little is enough. What rounding does to a gradient that
is nothing but rounding is known of the largest alone: that of float32 sums and, where the processor has them, of
products in bfloat16.
"""


def differing(found: Mapping[str, Print], kept: Mapping[str, Print]) -> list[str]:
    """The tensors of a call that differ by more than the rounding of another processor or number of threads."""
    coarsest = max((one for one, *_ in kept.values()), key=lambda one: torch.finfo(getattr(torch, one)).eps)
    eps, largest = torch.finfo(getattr(torch, coarsest)).eps, max(norm for _, norm, _ in kept.values())
    own, of_largest = ALLOWED[coarsest]

    def differs(name: str) -> bool:
        if name not in found or name not in kept or found[name][0] != kept[name][0]:
            return True
        allowed = eps * max(own * kept[name][1], of_largest * largest)
        return any(abs(a - b) > allowed for a, b in zip(found[name][1:], kept[name][1:], strict=True))

    return [name for name in {**found, **kept} if differs(name)]


def call(seed: int, engines: tuple[str, ...]) -> dict[str, dict[str, Print]]:
    """Engine to the tensors that it gives for one of the fuzzer's calls; those that do not serve it are left out."""
    described = draw(seed, engines)
    built = build(described)
    found: dict[str, dict[str, Print]] = {}
    for engine in engines:
        if described.dropout > 0 and engine == "sdpa":  # PyTorch's own, of other pairs in every version
            continue
        try:
            with set_to(described.tiles):
                out, lse, gradients = run(built, engine, described.autocast)
        except NotImplementedError as error:
            if not str(error).startswith(NOT_SERVED):
                raise
            continue
        tensors = {"out": out, "lse": lse, **{f"d {name}": x for name, x in gradients.items()}}
        found[engine] = {name: fingerprint(x) for name, x in tensors.items() if x is not None}
    return found


def cases() -> list[tuple[str, int, tuple[str, ...]]]:
    """Name, seed and engines of all calls: those without mechanisms, whose numbers depend on PyTorch. They are on the
    CPU, where Triton has its interpreter unless there is a GPU."""
    found = []
    for prefix, engines, count in (("", ENGINES, CALLS), ("triton ", ("triton",), INTERPRETED)):
        seeds = (seed for seed in itertools.count() if all(x.kind != "Mechanism" for x in draw(seed, engines).terms))
        found += [(f"{prefix}{seed}", seed, engines) for seed in itertools.islice(seeds, count)]
    return found


def model(name: str) -> dict[str, Print]:
    """The output of a small model with a mechanism and the gradients of its parameters, all together."""
    axes = presets()[name].token_axes
    given: Tensor
    built: torch.nn.Module
    if 2 in axes:
        built = relpos.VisionTransformer(
            (8, 12), 2, 1, 3, embed_dim=16, depth=2, num_heads=2, position=name, position_init_std=0.5
        )
        given = torch.linspace(-1, 1, 192, dtype=torch.float64).view(2, 1, 8, 12)
    else:
        built = relpos.LanguageModel(11, 24, embed_dim=16, depth=2, num_heads=2, position=name, position_init_std=0.5)
        given = (torch.arange(48).view(2, 24) ** 2) % 11
    with torch.no_grad():  # not as PyTorch draws them, which depends on its version
        for place, x in enumerate(built.double().parameters()):
            x.copy_(
                0.3 * torch.arange(1, x.numel() + 1, dtype=x.dtype).mul(0.7548776662466927 + place).cos().view_as(x)
            )
    out = built.eval()(given)  # no draws of training
    parameters = list(built.parameters())
    every = torch.autograd.grad(out, parameters, torch.linspace(-1, 1, out.numel()).view_as(out).double())
    # as float32, in which some mechanisms work inside
    return {"out": fingerprint(out.float()), "gradients": fingerprint(torch.cat([x.flatten() for x in every]).float())}


def signatures() -> dict[str, str]:
    """Public name to signature; of a class also those of its public methods."""
    found = {}
    for name in sorted(relpos.__all__):
        held = getattr(relpos, name)
        if not callable(held):
            continue
        found[name] = _signature(held)
        if inspect.isclass(held):
            own = [base for base in held.__mro__ if base.__module__.startswith("relpos")]
            methods = {one for base in own for one in vars(base) if not one.startswith("_")}
            for method in sorted(methods):
                inner = inspect.getattr_static(held, method)
                inner = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
                found[f"{name}.{method}"] = _signature(inner) if callable(inner) else type(inner).__name__
    return found


def _signature(held: Any) -> str:
    try:
        text = str(inspect.signature(held))
    except (TypeError, ValueError):
        return type(held).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\brelpos\.[\w.]+\.(?=\w)", "", text))


def main() -> None:
    def write(name: str, held: dict[str, Any]) -> None:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in held.items()]
        (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    os.environ["TRITON_INTERPRET"] = "1"  # here alone: the tests of a machine with a GPU run the kernels there
    torch.set_num_threads(1)
    made = {
        "signatures": signatures,
        "models": lambda: {name: model(name) for name in presets()},
        "calls": lambda: {name: call(seed, engines) for name, seed, engines in cases()},
    }
    for name in sys.argv[1:] or made:
        write(f"{name}.json", made[name]())


if __name__ == "__main__":
    main()
