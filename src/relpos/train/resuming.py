"""Capture and restore all state that determines the next step of a run.

The order of batches is not stored: it follows from the seed and the step number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from relpos.core.checks import fail
from relpos.position.base.saved_settings import is_settings
from relpos.train.snapshots import Snapshot


def whole(x: Tensor, *, keep: bool = True) -> Tensor:
    """The full tensor, which may be sharded, on the CPU. All processes must call it.

    Args:
        keep: whether this process needs it; False returns an empty tensor.
    """
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.cpu().clone().contiguous() if keep else x.new_empty(0)


def capture_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    generators: list[dict[str, Any]],
    state: dict[str, Any],
    *,
    keep: bool = True,
) -> Snapshot:
    """A snapshot of a run. All processes must call it. If the weights are sharded, the snapshot has parts.

    Args:
        keep: whether this process writes it.
        generators: the `generator_states` of every process.
        state: the loop's own state, plain values.
    """
    assert optimizer.state.keys() <= set(model.parameters()), "the optimizer has parameters that the model has not"
    sharded = any(isinstance(x, DTensor) for x in model.parameters())
    taken: Callable[[Tensor], Tensor] = Tensor.detach if sharded else partial(whole, keep=keep)
    moments: dict[str, Tensor] = {}
    counts: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                moments[f"{name}.{key}"] = taken(value)
            else:
                counts.setdefault(name, {})[key] = value
    drawn = {
        f"{rank}.{name}": x for rank, own in enumerate(generators) for name, x in own.items() if isinstance(x, Tensor)
    }
    plain = [{name: x for name, x in own.items() if not isinstance(x, Tensor)} for own in generators]
    tensors = {"model": {name: taken(x) for name, x in model.state_dict().items()}, "optimizer": moments}
    return Snapshot(
        {"random": drawn} if sharded else tensors | {"random": drawn},
        state | {"optimizer": counts, "scaler": scaler.state_dict(), "random": plain},
        tensors if sharded else {},
    )


def restore_state(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Load a snapshot into a model, an optimizer and a scaler.

    Raises:
        ValueError: the snapshot is of another model.
    """
    own, found = model.state_dict(), snapshot.tensors["model"]
    own = {name: x for name, x in own.items() if name in found or not is_settings(name)}  # older checkpoints have none
    wrong = sorted(own.keys() ^ found.keys())
    weights: dict[str, Tensor] = {}
    for name, like in own.items() if not wrong else ():
        x = found[name]
        if x.shape == like.shape or is_settings(name):  # loading compares settings
            weights[name] = _as(x, like)
        else:
            wrong.append(name)
    if wrong:
        fail("the weights of the same model in the checkpoint", f"others ({wrong[0]})", "Resume with the same data.")
    model.load_state_dict(weights)
    moments, counts = snapshot.tensors.get("optimizer", {}), snapshot.state["optimizer"]
    named = dict(model.named_parameters())
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in counts.items()}
    for key, value in moments.items():
        name, _, of_what = key.rpartition(".")
        like = named[name]
        states.setdefault(name, {})[of_what] = (
            _as(value, like) if tuple(value.shape) == tuple(like.shape) else value.to(like.device)
        )
    for name, values in states.items():
        optimizer.state[named[name]] = values
    scaler.load_state_dict(snapshot.state["scaler"])


def _as(x: Tensor, like: Tensor) -> Tensor:
    """A full tensor on the device of `like`, sharded like it."""
    x = x.to(like.device)
    if not isinstance(like, DTensor):
        return x
    # Each process has read the full tensor; a copy of its shard frees the rest.
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None).clone()


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators: PyTorch's, Python's and NumPy's."""
    kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - what others draw from
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]],
        "numpy": [kind, np.asarray(words).tolist(), *rest],
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_generator_states(snapshot: Snapshot, rank: int, device: torch.device) -> None:
    """Restore the generators of this rank from a snapshot; a rank that it lacks keeps its new seed."""
    every = snapshot.state["random"]
    if rank >= len(every):
        return
    own, tensors = every[rank], snapshot.tensors["random"]
    torch.set_rng_state(tensors[f"{rank}.torch"])
    version, words, gauss = own["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(own["numpy"]))  # noqa: NPY002
    if device.type == "cuda" and f"{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{rank}.cuda"], device)
