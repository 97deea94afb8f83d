"""The training loop: warm-up and cosine, gradient clipping; reproducible bit for bit at a fixed thread count.

accelerate handles precision, except float16, whose losses are scaled here because accelerate refuses it on a CPU. All
randomness (initialisation, batches, dropout, Sophia's draws) comes from one seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from relpos.core.checks import fail
from relpos.data import Task
from relpos.optim import Sophia
from relpos.train.checkpointing import Checkpointing
from relpos.train.evaluate import validated
from relpos.train.optimizers import estimate_hessian, make_optimizer
from relpos.train.procedure import OURS, Procedure, to_device
from relpos.train.processes import Parallelism, all_of, means_of, number_of, world_size
from relpos.train.recipe import Model, Recipe
from relpos.train.resuming import capture_state, generator_states, restore_state, set_generator_states, whole

PRECISIONS = {"float32": "no", "bf16-mixed": "bf16", "fp16-mixed": "no"}
"""accelerate's `mixed_precision` for each precision."""
AUTOCAST = {"float32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""The autocast dtype of each precision; None for the weights' dtype."""


@dataclass(frozen=True)
class Progress:
    """The argument of `watch`, after every step; `validation` only after some."""

    step: int
    steps: int
    loss: float
    rate: float
    validation: float | None = None


@dataclass
class Curve:
    """The history of a training run: the mean loss since the previous point, and the validation metric."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    validation_step: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)

    def add(self, step: int, losses: list[float], rate: float) -> None:
        """Add a point after a step: the mean of `losses`, which is then cleared."""
        self.step.append(step)
        self.loss.append(torch.tensor(losses).mean().item())
        self.rate.append(rate)
        losses.clear()


_SKIPPED_AT_MOST = 40
"""Consecutive steps that float16 may skip: each halves its scale, which is then below one."""


class DivergedError(ValueError):
    """Training stopped because a loss or a gradient was nan or inf.

    Attributes:
        step: counted from 1. Weights exclude this step, unless they caused the NaN.
        rate: the learning rate of the step.
        what: "loss" or "gradient". value: "nan", "inf" or "-inf".
        curve: the history before it.
    """

    def __init__(
        self, what: Literal["loss", "gradient"], value: float, *, step: int, recipe: Recipe, position: str, curve: Curve
    ) -> None:
        self.step, self.what, self.value, self.curve = step, what, str(value), curve
        self.rate = rate_at(step - 1, recipe)
        super().__init__(
            f"expected a finite {what}; got {value} at step {step} of {recipe.steps}, at the learning rate "
            f"{self.rate:.1e}, with the position {position}. Lower the recipe's learning rate, or choose another "
            "precision, optimizer or seed."
        )


def rate_at(step: int, recipe: Recipe) -> float:
    """The learning rate of a step (from 0): linear warm-up, then a cosine to 0."""
    warmup = min(recipe.warmup_steps, recipe.steps)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, recipe.steps - warmup)))


def require_precision(precision: str) -> None:
    """Raise unless `precision` is the name of a precision."""
    if precision not in PRECISIONS:
        fail(f"a precision among {', '.join(PRECISIONS)}", repr(precision), "Choose one of them.")


def resolve_device(device: str) -> torch.device:
    """The device of a name; `"auto"` is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):  # TypeError: not a string
        fail("a device (auto, cpu, cuda, cuda:0)", repr(device), "Leave --device out for auto.")
    if resolved.type not in ("cpu", "cuda"):
        fail("a device (auto, cpu, cuda, cuda:0)", repr(device), "Leave --device out for auto.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= gpus:
        fail("a device that this machine has", repr(device), f"PyTorch sees {gpus} GPUs here; use --device cpu.")
    return resolved


def train(
    task: Task,
    position: str,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device,
    precision: str = "float32",
    watch: Callable[[Progress], None] | None = None,
    points: int = 40,
    validations: int = 8,
    **more: Any,
) -> tuple[Model, Curve]:
    """Train the recipe's model with a position mechanism: `fit` with relpos's own procedure."""
    model, curve = fit(
        task, position, recipe, OURS, seed=seed, device=device, precision=precision, watch=watch, points=points,
        validations=validations, **more,
    )  # fmt: skip
    return cast("Model", model), curve


def fit(
    task: Task,
    position: str,
    recipe: Recipe,
    procedure: Procedure,
    *,
    seed: int,
    device: torch.device,
    precision: str = "float32",
    watch: Callable[[Progress], None] | None = None,
    points: int = 40,
    validations: int = 8,
    parallelism: Parallelism = Parallelism(),  # noqa: B008 - it is frozen
    checkpointing: Checkpointing | None = None,
    resume: str | None = None,
) -> tuple[nn.Module, Curve]:
    """Train a model with a position mechanism.

    Args:
        procedure: builds the model, computes its loss and measures it.
        watch: called after every step.
        points, validations: number of points on the loss curve, and of validations.
        parallelism: how a step is divided among the launcher's processes and into parts.
        checkpointing: where checkpoints are written; None for none.
        resume: "auto" or the path of a checkpoint to resume from.

    Returns:
        The trained model in evaluation mode, and its curve.

    Raises:
        DivergedError: a loss or a gradient is nan or inf. With float16, whose gradient is scaled, a step with such a
            gradient is skipped instead, up to forty in a row.
        StoppedError: the process was told to end; `checkpointing` has its last state.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    require_precision(precision)
    if resume is not None and checkpointing is None:
        fail("checkpointing= beside resume=", "none", "Pass a Checkpointing with the folder of the run.")
    # accelerate's state is global, and an earlier run may have had another device or precision. We place tensors:
    # accelerate would use cuda:0 regardless of `device`.
    AcceleratorState._reset_state(reset_partial_state=True)
    cpu = device.type == "cpu"
    alone = GradientAccumulationPlugin(num_steps=1)  # overrides its environment: parts are accumulated here
    accelerator = Accelerator(
        cpu=cpu,
        device_placement=False,
        mixed_precision=PRECISIONS[precision],
        gradient_accumulation_plugin=alone,
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        fail("accelerate without a plugin", accelerator.distributed_type.value, "Leave it to --strategy.")
    world, rank = accelerator.num_processes, accelerator.process_index
    if world_size() != world:
        fail(f"{world_size()} processes that know of each other", str(world), "Start them with torchrun.")
    parallelism.require_divides(recipe.batch_size, world)
    _require_shares(recipe, precision, parallelism, world)
    with nullcontext() if checkpointing is None else checkpointing.running(resume) as resumed:
        _seed_everything(seed)
        built = procedure.model(recipe, task, position).to(device)
        if rank:
            _seed_everything(seed + rank * _APART)  # different dropout per process
        model = parallelism.wrap(built, accelerator, device)
        optimizer = make_optimizer(recipe.optimizer, recipe.groups(built))
        half = precision == "fp16-mixed"
        # Without float16 it neither scales nor skips.
        scaler = torch.amp.GradScaler(device.type, enabled=half)

        now = _Now()
        if resumed is not None:
            restore_state(resumed, built, optimizer, scaler)
            set_generator_states(resumed, rank, device)
            now = _Now.of(resumed.state["loop"])
        batches = task.batches(recipe.batch_size, seed, start=now.step)
        curve, losses = now.curve, now.losses

        def require_finite(what: Literal["loss", "gradient"], value: float, step: int) -> None:
            if math.isfinite(value):
                return
            if losses:
                curve.add(step - 1, losses, rate_at(max(0, step - 2), recipe))
            raise DivergedError(what, value, step=step, recipe=recipe, position=position, curve=curve)

        def write(step: int) -> bool:
            assert checkpointing is not None
            if hasattr(built, "reshard"):
                # after a validation the root of a sharded model is unsharded, with other parameters
                built.reshard()  # type: ignore[operator]
            snapshot = capture_state(
                built,
                optimizer,
                scaler,
                all_of(generator_states(device)),
                {"loop": asdict(now)},
                keep=checkpointing.writes,
            )
            written = checkpointing.write(step, snapshot)
            return bool(all_of(written)[0])  # waits for all processes; False if rank 0 failed

        def end(step: int) -> None:
            assert checkpointing is not None
            checkpointing.exit_code = checkpointing.exit_code or 143  # set if another process was told to end
            checkpointing.end(step, written=write(step))

        model.train()
        for step in range(now.step, recipe.steps):
            done, rate = step + 1, rate_at(step, recipe)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["multiplier"]
            share = to_device(parallelism.share(next(batches), accelerator), device)
            if isinstance(optimizer, Sophia) and step % recipe.hessian_every == 0:
                # not in float16: squares would overflow
                estimate_hessian(recipe.optimizer, optimizer, model, *share, processes=world)
            reached = 0.0
            for number, part in enumerate(parallelism.parts(share), 1):
                with parallelism.no_sync(model, accelerator, last=number == parallelism.accumulate):
                    with torch.autocast(device.type, torch.float16) if half else accelerator.autocast():
                        loss = procedure.loss(model, part) / parallelism.accumulate
                    reached += loss.item()
                    accelerator.backward(scaler.scale(loss))
            told = 0 if checkpointing is None else checkpointing.told()
            due = checkpointing is not None and checkpointing.due(done)
            reached, told_somewhere, due_somewhere = means_of([reached, float(told), float(due)], device)
            require_finite("loss", reached, done)
            scaler.unscale_(optimizer)
            norm = number_of(nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip))
            now.skipped = now.skipped + 1 if half and not math.isfinite(norm) else 0
            if not half or now.skipped > _SKIPPED_AT_MOST:
                require_finite("gradient", norm, done)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(reached)
            if done % max(1, recipe.steps // points) == 0 or done == recipe.steps:
                curve.add(done, losses, rate)
            if done % max(1, recipe.steps // validations) == 0 or done == recipe.steps:
                # No later step would show that the last step's weights are not finite.
                require_finite("loss", means_of([_loss(model, share, procedure)], device)[0], done)
                valid = _validated(model, task, device, recipe, procedure)
                require_finite("loss", valid, done)
                curve.validation_step.append(done)
                curve.validation.append(valid)
                model.train()
            now.step = done
            if watch is not None:
                seen = curve.validation[-1] if curve.validation_step[-1:] == [done] else None
                watch(Progress(done, recipe.steps, reached, rate, seen))
            if checkpointing is not None and told_somewhere:
                end(done)
            if checkpointing is not None and due_somewhere and done < recipe.steps:
                write(done)
        if checkpointing is not None and means_of([float(checkpointing.told())], device)[0]:  # signal in the last step
            end(recipe.steps)
    model.eval()
    if parallelism.strategy == "fsdp" and world > 1:
        weights = {name: whole(x) for name, x in built.state_dict().items()}
        unsharded = procedure.model(recipe, task, position).to(device)
        unsharded.load_state_dict(weights)
        return unsharded.eval(), curve
    unwrapped: nn.Module = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return unwrapped, curve


_APART = 1_000_003
"""Difference between the seeds of consecutive processes."""


@dataclass
class _Now:
    """The progress of a run as plain values for a checkpoint, without tensors."""

    step: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)

    @staticmethod
    def of(tree: dict[str, Any]) -> _Now:
        """Read from a checkpoint."""
        return _Now(**(tree | {"curve": Curve(**tree["curve"])}))


def _require_shares(recipe: Recipe, precision: str, parallelism: Parallelism, world: int) -> None:
    """Raise if the optimizer or precision does not work with several processes."""
    if world == 1:
        return
    if recipe.optimizer == "sophia-h" or (parallelism.strategy == "fsdp" and recipe.optimizer == "sophia-g"):
        remedy = "Use adamw or lion" + (", or strategy ddp with sophia-g." if recipe.optimizer == "sophia-g" else ".")
        fail("an optimizer whose estimates several processes share", recipe.optimizer, remedy)
    if parallelism.strategy == "fsdp" and precision == "fp16-mixed":
        fail("float32 or bf16-mixed with strategy fsdp", precision, "Its losses would be scaled apart.")


def _seed_everything(seed: int) -> None:
    """Also seed the generators that a user's own model or dataset may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the one that others draw from
    torch.manual_seed(seed)


@torch.no_grad()
def _loss(model: nn.Module, batch: Any, procedure: Procedure) -> float:
    """The loss of a batch in float32 and without dropout. Leaves the model in evaluation mode."""
    model.eval()
    return procedure.loss(model, batch).item()


def _validated(model: nn.Module, task: Task, device: torch.device, recipe: Recipe, procedure: Procedure) -> float:
    if not procedure.measures:
        return validated(model, task, device)
    return procedure.figures(model, task, "validation", device, recipe.batch_size, at_most=None).mean().item()
