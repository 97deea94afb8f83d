"""Verify a retrofit: run a copy of a module as published and by relpos, on the same inputs, in `eval()`.

Position tables are perturbed first, since some start at zero. So are weights too small to affect a score. The batch is
padded. relpos's path is forced and counted: a small batch would run as published and agree with itself. Outputs and
gradients are compared with the published ones in float64, even where the library computes a softmax in float32. In
float32 relpos's error relative to float64 may be at most four times the published module's. One run under reentrant
checkpointing checks its gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from relpos.adapters.common import interface
from relpos.adapters.common.kinds import Verified, path_of, verified_classes
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import is_swapped, published_class, route, unswap
from relpos.adapters.replacements.repositioned import is_retrofitted

BATCH, TOKENS = 2, 24
_OF_FLOAT32 = 4.0
"""Largest float32 error of relpos relative to the published module's. Both errors are relative to float64."""
_FLOOR = 1e-3
"""Gradients are compared relative to their own largest value, or to this fraction of the largest gradient if that is
more: small gradients contain the rounding errors of large ones."""


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a module. Each difference is the largest one, relative to the largest value.

    Attributes:
        module: its name in the model. path: its class.
        output, gradient: differences in float64.
        output32, gradient32: relpos's error in float32 divided by the published module's.
        fault: what is wrong, or None. ran: whether both versions could be run.
    """

    module: str
    path: str
    output: float = 0.0
    gradient: float = 0.0
    output32: float = 0.0
    gradient32: float = 0.0
    fault: str | None = None
    ran: bool = True

    def __str__(self) -> str:
        name = self.path.rpartition(".")[2]
        return (
            f"{name} ({self.module or 'the model itself'}): float64 output {self.output:.0e}, gradient "
            f"{self.gradient:.0e}; float32 {self.output32:.1f} and {self.gradient32:.1f} times the published error"
        )


Result = tuple[tuple[Tensor, ...], dict[str, Tensor | None]]
"""Outputs, and gradients by name."""


def verify_model(model: nn.Module, progress: Callable[[str], object] | None = None) -> list[Verdict]:
    """Verify one module of each class and shape of a retrofitted model; the model itself is not run."""
    verdicts = []
    for name, module, verified in _representatives(model):
        if progress is not None:
            progress(name)
        verdicts.append(verify_module(module, verified, name))
    return verdicts


def _representatives(model: nn.Module) -> Iterator[tuple[str, nn.Module, Verified]]:
    """Modules to verify: the first for each class, parameter shapes and plain settings."""
    seen = set()
    for name, module in model.named_modules():
        path = path_of(published_class(module))
        if path not in verified_classes() or not any(map(is_retrofitted, module.modules())):
            continue
        shapes = tuple((key, tuple(x.shape)) for key, x in module.named_parameters())
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and key not in ("training", "layer_idx")
        )
        if (path, shapes, settings) not in seen:
            seen.add((path, shapes, settings))
            yield name, module, verified_classes()[path]


def verify_module(module: nn.Module, verified: Verified, name: str = "") -> Verdict:
    """Run copies of a retrofitted module as published and by relpos, and compare."""
    path = path_of(published_class(module))
    try:
        with _isolated(module):
            return _compare(module, verified, name, path)
    except Exception as error:  # another library version can raise any error
        said = " ".join(str(error).split())[:300]
        return Verdict(name, path, fault=f"it could not run, {type(error).__name__}: {said}", ran=False)


def _compare(module: nn.Module, verified: Verified, name: str, path: str) -> Verdict:
    exact = _run(_copy(module, verified, torch.float64, published=True), verified)
    ours = _run(_copy(module, verified, torch.float64, published=False), verified)
    saved = _run(_copy(module, verified, torch.float64, published=False), verified, checkpointed=True)
    output, gradient = _differences(ours, exact)
    found: dict[str, Any] = {"output": output, "gradient": gradient}
    missing = _missing(ours, exact) or _missing(saved, exact)
    if missing:
        return Verdict(name, path, **found, fault=missing)
    for what, difference, limit in (
        ("output differs", output, verified.exact),
        ("gradient differs", gradient, verified.exact),
        ("gradient under reentrant checkpointing differs", _differences(saved, exact)[1], verified.exact),
    ):
        if not difference <= limit:
            return Verdict(name, path, **found, fault=f"{what} by {difference:.1e} in float64")
    single = _run(_copy(module, verified, torch.float32, published=True), verified)
    ours32 = _run(_copy(module, verified, torch.float32, published=False), verified)
    unit = torch.finfo(torch.float32).eps
    for what, theirs, own, least in zip(
        ("output", "gradient"),
        _differences(single, exact),
        _differences(ours32, exact),
        (0.0, unit / _FLOOR),  # one ulp of the largest gradient is rounding in those that are zero
        strict=True,
    ):
        found[f"{what}32"] = own / max(theirs, 4 * unit)  # a published error of 0 or 1 ulp is luck
        if not (found[f"{what}32"] <= _OF_FLOAT32 or own <= least):
            fault = f"{what} is {found[f'{what}32']:.1f} times as far from float64 as the published one in float32"
            return Verdict(name, path, **found, fault=fault)
    return Verdict(name, path, **found)


class _InFloat64(TorchFunctionMode):
    """Keep float64 tensors in float64 when float32 is requested. Libraries compute some softmaxes in float32; its
    rounding would hide small differences."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def _isolated(module: nn.Module) -> Iterator[None]:
    """Isolate the run from the caller's random state, autocast and gradient mode, and leave them unchanged."""
    device = next((x.device for x in module.parameters()), torch.device("cpu"))
    kind = device.type
    devices = [device] if kind == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.autocast(kind, enabled=False):
        yield


def _copy(module: nn.Module, verified: Verified, dtype: torch.dtype, *, published: bool) -> nn.Module:
    """A copy with perturbed tables and without hooks, which may record or shard."""
    kept = {name: part for name, part in module._modules.items() if name not in verified.without}
    kept |= {name: nn.ModuleList([part[0]]) for name, part in kept.items() if name in verified.first}  # type: ignore[index]
    shallow = copy.copy(module)
    shallow.__dict__["_modules"] = kept
    kept_results = (x for one in shallow.modules() for x in vars(one).values() if isinstance(x, Tensor))
    # results of an earlier call, such as ESPnet's attention weights, which cannot be copied with their graph
    other = copy.deepcopy(shallow, {id(x): x.detach() for x in kept_results if not x.is_leaf})
    other.eval()  # not chained: LeViT's returns None
    for one in other.modules():
        one._forward_hooks.clear()
        one._forward_pre_hooks.clear()
        one._backward_hooks.clear()
        config: Any = getattr(one, "config", None)
        if getattr(config, "output_attentions", False):
            config.output_attentions = False  # a call that returns weights runs as published
        if not is_swapped(one):
            continue
        if route(one).switched:
            interface.switch(config)
        if published:
            unswap(one)
        else:
            route(one).forced = True
    if published:
        for one in other.modules():
            interface.switch_back(getattr(one, "config", None))
    other.float()
    generator = torch.Generator().manual_seed(1)
    for key, x in other.named_parameters():
        x.requires_grad_(x.is_floating_point())
        x.grad = None
        spread = float(x.detach().std()) if x.numel() > 1 else 0.0
        usual = (x.numel() // x.shape[0]) ** -0.5 if x.dim() > 1 else 0.0
        if key.endswith(verified.tables):
            x.data += max(0.5, spread) * torch.randn(x.shape, generator=generator).to(x.device)
        elif spread < 0.1 * usual:  # SAM's weights start at 1e-10: scores would be 0
            x.data += usual * torch.randn(x.shape, generator=generator).to(x.device)
    return other.to(dtype)


def _run(module: nn.Module, verified: Verified, *, checkpointed: bool = False) -> Result:
    """Outputs and gradients of one module. Raises if relpos should have computed and did not."""
    parameter = next(module.parameters())
    draws = RandomInputs(BATCH, TOKENS, parameter.dtype, parameter.device)
    outputs = _outputs(module, verified, draws)
    if checkpointed:

        def again(*inputs: Tensor) -> tuple[Tensor, ...]:
            replayed = RandomInputs(BATCH, TOKENS, parameter.dtype, parameter.device, replay=inputs)
            return _outputs(module, verified, replayed)

        outputs = checkpoint(again, *draws.inputs, use_reentrant=True)
    swapped = [one for one in module.modules() if is_swapped(one)]
    if swapped and not any(route(one).forced_calls for one in swapped):
        raise RuntimeError("relpos was not asked to compute")
    generator = torch.Generator().manual_seed(2)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x.device, x.dtype)).sum() for x in outputs)
    named = {f"input {index}": x for index, x in enumerate(draws.inputs)}
    named |= {key: x for key, x in module.named_parameters() if x.requires_grad}
    if checkpointed:
        total.backward()  # type: ignore[union-attr]
        gradients: list[Tensor | None] = [x.grad for x in named.values()]
    else:
        gradients = list(torch.autograd.grad(total, list(named.values()), allow_unused=True))  # type: ignore[arg-type]
    return tuple(x.detach() for x in outputs), dict(zip(named, gradients, strict=True))


def _outputs(module: nn.Module, verified: Verified, draws: RandomInputs) -> tuple[Tensor, ...]:
    in_float64 = _InFloat64() if draws.dtype == torch.float64 else nullcontext()
    with in_float64:  # here, because a backward pass leaves such modes
        return verified.run(module, draws)


def _missing(ours: Result, exact: Result) -> str | None:
    """A fault if shapes differ, or if a gradient is None on one side only."""
    shapes = [tuple(x.shape) for x in ours[0]], [tuple(x.shape) for x in exact[0]]
    if shapes[0] != shapes[1]:
        return f"outputs have shapes {shapes[0]}, not {shapes[1]}"
    for key, theirs in exact[1].items():
        if (ours[1][key] is None) != (theirs is None):
            return f"the gradient of {key} is {'missing' if ours[1][key] is None else 'present, but None as published'}"
    return None


def _differences(ours: Result, exact: Result) -> tuple[float, float]:
    """The largest differences of outputs and of gradients; NaN if ours are not finite."""
    output = max(_relative(own, theirs, 0.0) for own, theirs in zip(ours[0], exact[0], strict=True))
    largest = max((float(x.abs().max()) for x in exact[1].values() if x is not None and x.numel()), default=0.0)
    pairs = [(ours[1][key], theirs) for key, theirs in exact[1].items()]
    gradient = max(
        (_relative(own, theirs, _FLOOR * largest) for own, theirs in pairs if own is not None and theirs is not None),
        default=0.0,
    )
    return output, gradient


def _relative(own: Tensor, theirs: Tensor, floor: float) -> float:
    own, theirs = own.double(), theirs.double()
    if own.shape != theirs.shape or not torch.isfinite(own).all():
        return float("nan")
    if not own.numel():
        return 0.0
    size = max(float(theirs.abs().max()), floor, 1e-300)
    return float((own - theirs).abs().max()) / size
