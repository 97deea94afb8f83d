"""What changes in a training run, and its way into a checkpoint and back.

The order of batches is not stored: it follows from the seed and the step number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from relpos.core.checks import fail
from relpos.position.base.saved_settings import is_settings
from relpos.train.curve import Curve
from relpos.train.optimizers import make_optimizer
from relpos.train.processes import all_of
from relpos.train.run import TrainingRun
from relpos.train.snapshots import Snapshot

if TYPE_CHECKING:
    from accelerate import Accelerator

_SEEDS_APART = 1_000_003
"""Difference between the seeds of consecutive processes."""


class TrainState:
    """All that determines the next step of a run.

    Attributes:
        model: as the processes train it. module: the same without what the strategy wraps around it.
        optimizer: of its parameters. scaler: of float16's losses; with other precisions it does nothing.
        step: finished steps; during one, its number from 1.
        skipped: consecutive steps that float16 has skipped.
        losses: since the curve's last point. curve: the history.
    """

    def __init__(self, run: TrainingRun, accelerator: Accelerator) -> None:
        self._device, self._rank = run.device, accelerator.process_index
        _seed_everything(run.seed)
        self.module = run.model()
        if self._rank:  # different dropout per process
            _seed_everything(run.seed + self._rank * _SEEDS_APART)
        self.model = run.parallelism.wrap(self.module, accelerator, run.device)
        self.optimizer = make_optimizer(run.recipe.optimizer, run.recipe.groups(self.module))
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=run.is_float16)
        self.step, self.skipped = 0, 0
        self.losses: list[float] = []
        self.curve = Curve()

    def capture(self, *, keep: bool = True) -> Snapshot:
        """A snapshot. All processes must call it. If the weights are sharded, the snapshot has parts.

        Args:
            keep: whether this process writes it.
        """
        module, optimizer = self.module, self.optimizer
        if hasattr(module, "reshard"):
            # after a validation the root of a sharded model is unsharded, with other parameters
            module.reshard()  # type: ignore[operator]
        assert optimizer.state.keys() <= set(module.parameters()), "the optimizer has parameters that the model lacks"
        sharded = any(isinstance(x, DTensor) for x in module.parameters())
        taken: Callable[[Tensor], Tensor] = Tensor.detach if sharded else partial(whole, keep=keep)
        moments: dict[str, Tensor] = {}
        counts: dict[str, dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    moments[f"{name}.{key}"] = taken(value)
                else:
                    counts.setdefault(name, {})[key] = value
        generators = all_of(_generator_states(self._device))
        drawn = {
            f"{rank}.{name}": x
            for rank, states in enumerate(generators)
            for name, x in states.items()
            if isinstance(x, Tensor)
        }
        tensors = {"model": {name: taken(x) for name, x in module.state_dict().items()}, "optimizer": moments}
        loop = {"step": self.step, "skipped": self.skipped, "losses": list(self.losses), "curve": asdict(self.curve)}
        return Snapshot(
            {"random": drawn} if sharded else tensors | {"random": drawn},
            {
                "loop": loop,
                "optimizer": counts,
                "scaler": self.scaler.state_dict(),
                "random": [
                    {name: x for name, x in states.items() if not isinstance(x, Tensor)} for states in generators
                ],
            },
            tensors if sharded else {},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on where a snapshot was taken.

        Raises:
            ValueError: the snapshot is of another model.
        """
        restore_weights(self.module, snapshot)
        _restore_moments(self.module, self.optimizer, snapshot)
        self.scaler.load_state_dict(snapshot.state["scaler"])
        _set_generator_states(snapshot, self._rank, self._device)
        loop = snapshot.state["loop"]
        self.step, self.skipped, self.losses = loop["step"], loop["skipped"], loop["losses"]
        self.curve = Curve(**loop["curve"])


def whole(x: Tensor, *, keep: bool = True) -> Tensor:
    """The full tensor, which may be sharded, on the CPU. All processes must call it.

    Args:
        keep: whether this process needs it; False returns an empty tensor.
    """
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.cpu().clone().contiguous() if keep else x.new_empty(0)


def restore_weights(model: nn.Module, snapshot: Snapshot) -> None:
    """Load a snapshot's weights and buffers, sharded as the model's are.

    Raises:
        ValueError: they are another model's.
    """
    expected, stored = model.state_dict(), snapshot.tensors["model"]
    # older checkpoints have no settings
    expected = {name: x for name, x in expected.items() if name in stored or not is_settings(name)}
    wrong = sorted(expected.keys() ^ stored.keys())
    weights: dict[str, Tensor] = {}
    for name, like in expected.items() if not wrong else ():
        x = stored[name]
        if x.shape == like.shape or is_settings(name):  # loading compares settings
            weights[name] = _as(x, like)
        else:
            wrong.append(name)
    if wrong:
        fail("the weights of the same model in the checkpoint", f"others ({wrong[0]})", "Resume with the same data.")
    model.load_state_dict(weights)


def _restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    moments, counts = snapshot.tensors.get("optimizer", {}), snapshot.state["optimizer"]
    parameters = dict(model.named_parameters())

    def parameter(name: str) -> nn.Parameter:
        if name not in parameters:
            expected = "moments of the model's own parameters in the checkpoint"
            fail(expected, f"some of {name!r}", "Resume with the same data.")
        return parameters[name]

    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in counts.items()}
    for key, value in moments.items():
        name, _, moment = key.rpartition(".")
        like = parameter(name)
        states.setdefault(name, {})[moment] = (
            _as(value, like) if tuple(value.shape) == tuple(like.shape) else value.to(like.device)
        )
    for name, values in states.items():
        optimizer.state[parameter(name)] = values


def _as(x: Tensor, like: Tensor) -> Tensor:
    """A full tensor on the device of `like`, sharded like it."""
    x = x.to(like.device)
    if not isinstance(like, DTensor):
        return x
    # Each process has read the full tensor; a copy of its shard frees the rest.
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None).clone()


def _seed_everything(seed: int) -> None:
    """Also seed the generators that a user's own model or dataset may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the one that others draw from
    torch.manual_seed(seed)


def _generator_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's generators: PyTorch's, Python's and NumPy's."""
    kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - what others draw from
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]],
        "numpy": [kind, np.asarray(words).tolist(), *rest],
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_generator_states(snapshot: Snapshot, rank: int, device: torch.device) -> None:
    """Restore the generators of this rank from a snapshot; a rank that it lacks keeps its new seed."""
    every = snapshot.state["random"]
    if rank >= len(every):
        return
    plain, tensors = every[rank], snapshot.tensors["random"]
    torch.set_rng_state(tensors[f"{rank}.torch"])
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(plain["numpy"]))  # noqa: NPY002
    if device.type == "cuda" and f"{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{rank}.cuda"], device)
