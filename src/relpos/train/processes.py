"""A run over several processes, started by torchrun or `accelerate launch`: each computes its share of every batch.

ddp     each process holds the model; gradients are averaged (PyTorch's DistributedDataParallel)
fsdp    each holds a shard of every weight, and gathers a block's weights to compute it (FSDP2, `fully_shard`)

Where processes share sequences (`context`), c consecutive ones have the same elements and a part of the tokens each.
Every process draws the full batch from the same seed, and process r of n takes its elements r, r + n, .... So n
processes train on the same data as one. Each block is one shard unit; the rest, with shared positions, is another.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from relpos.core.checks import fail, require_choice, require_int

if TYPE_CHECKING:
    from accelerate import Accelerator

    from relpos.parallel.layout import ShardLayout

Strategy = Literal["ddp", "fsdp"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Parallelism:
    """How a step is divided among processes and into parts.

    Attributes:
        strategy: "ddp" or "fsdp". accumulate: number of parts of a process's share, computed one after another.
        compile: compile each block.
        context: number of processes that share a sequence; consecutive ones do.
    """

    strategy: Strategy = "ddp"
    accumulate: int = 1
    compile: bool = False
    context: int = 1

    def __post_init__(self) -> None:
        require_choice(self.strategy, "strategy", STRATEGIES)
        require_int(self.accumulate, "accumulate", at_least=1)
        require_int(self.context, "context", at_least=1)
        if self.context > 1 and self.compile:
            fail("no compiled blocks with sequences over several processes", "both", "Leave out --compile.")

    def require_divides(self, batch_size: int, world: int) -> None:
        """Raise unless processes can be divided into groups that share sequences, and a batch into equal parts."""
        if world % self.context:
            remedy = f"Start a multiple of {self.context} processes."
            fail(f"processes in groups of {self.context}, which share sequences", str(world), remedy)
        world //= self.context
        parts = world * self.accumulate
        if batch_size % parts:
            below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
            near = f"{below} or {above}" if below else f"{above}"
            fail(
                f"a batch divisible by {world} processes x {self.accumulate} accumulated parts",
                str(batch_size),
                f"Choose a batch size of {near}.",
            )

    def require_shares(self, optimizer: str, precision: str, world: int) -> None:
        """Raise if the optimizer or the precision does not work with several processes."""
        if world == 1:
            return
        if self.context > 1 and optimizer.startswith("sophia"):
            fail("an optimizer whose estimates need no whole sequences", optimizer, "Use adamw or lion.")
        if optimizer == "sophia-h" or (self.strategy == "fsdp" and optimizer == "sophia-g"):
            remedy = "Use adamw or lion" + (", or strategy ddp with sophia-g." if optimizer == "sophia-g" else ".")
            fail("an optimizer whose estimates several processes share", optimizer, remedy)
        if self.strategy == "fsdp" and precision == "fp16-mixed":
            fail("float32 or bf16-mixed with strategy fsdp", precision, "Each process would scale its own losses.")

    def wrap(self, model: nn.Module, accelerator: Accelerator, device: torch.device) -> nn.Module:
        """Wrap a model so that every process gets the gradients of the whole batch."""
        if self.compile:
            for block in blocks_of(model):
                block.compile()
        if self.context > 1:
            from relpos.parallel import context_parallel

            context_parallel(model, self._sharing(device, accelerator.num_processes), layout=self.layout(model))
        if self.strategy == "fsdp" and accelerator.num_processes > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (accelerator.num_processes,))
            for block in blocks_of(model):
                fully_shard(block, mesh=mesh)
            sharded: nn.Module = fully_shard(model, mesh=mesh)  # type: ignore[assignment]
            return sharded
        prepared: nn.Module = accelerator.prepare(model)
        return prepared

    def parts(self, share: Any) -> Iterator[Any]:
        """Yield the parts of a process's share of a batch."""
        count = self.accumulate
        for first in range(count):
            yield share if count == 1 else _every(share, first, count)

    def layout(self, model: nn.Module) -> ShardLayout:
        """Which tokens each process has: of a language model, whose mask is causal, such as give all equal work."""
        from relpos.models import LanguageModel

        language = next((one for one in model.modules() if isinstance(one, LanguageModel)), None)
        equal = language is not None and language.context % (2 * self.context) == 0
        return "zigzag" if equal else "contiguous"

    def share(self, batch: Any, accelerator: Accelerator, model: nn.Module) -> Any:
        """This process's share of a batch, for the model that takes it."""
        world, rank = accelerator.num_processes, accelerator.process_index
        if self.context == 1:
            return batch if world == 1 else _every(batch, rank, world)
        own = _every(batch, rank // self.context, world // self.context)
        inputs, classes = own
        if classes.dim() > 1:  # of tokens, not of images
            from relpos.parallel import shard

            classes = shard(classes, self._sharing(classes.device, world), layout=self.layout(model))
        return inputs, classes

    @contextmanager
    def whole_sequences(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """A context in which each process computes whole sequences: every one evaluates all of a split."""
        if self.context == 1:
            yield
            return
        from relpos.parallel import context_parallel

        context_parallel(model, None)
        try:
            yield
        finally:
            context_parallel(model, self._sharing(device, world_size()), layout=self.layout(model))

    def _sharing(self, device: torch.device, world: int) -> DeviceMesh:
        """This process's dimension of the mesh of batch and sequence."""
        key = (device.type, world, self.context)
        if key not in _MESHES:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (world // self.context, self.context)
            _MESHES[key] = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        return _MESHES[key]["context"]

    def no_sync(self, model: nn.Module, accelerator: Accelerator, *, last: bool) -> AbstractContextManager[Any]:
        """A context for a backward pass: only the last part synchronizes gradients."""
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if last else accelerator.no_sync(model)


_MESHES: dict[tuple[str, int, int], DeviceMesh] = {}
"""By device, processes, and processes that share a sequence: a mesh has groups of its own."""


def _every(batch: Any, first: int, step: int) -> Any:
    """Every `step`-th element of a batch's tensors, from `first` on."""
    return pytree.tree_map_only(Tensor, lambda x: x[first::step], batch)


def start_accelerator(device: torch.device, mixed_precision: str) -> Accelerator:
    """accelerate for a run on a device, with the launcher's processes.

    Its state is global, and an earlier run may have had another device or precision: it starts anew. Tensors are placed
    by the loop, because accelerate would use cuda:0 whatever `device` is.

    Raises:
        ValueError: its environment asks for a plugin, or the processes do not know of each other.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        device_placement=False,
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1
        ),  # overrides its environment: `parts` do it
    )
    if accelerator.distributed_type.value not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        fail("accelerate without a plugin", accelerator.distributed_type.value, "Leave it to --strategy.")
    if world_size() != accelerator.num_processes:
        came = str(accelerator.num_processes)
        fail(f"{world_size()} connected processes", came, "Start them with torchrun.")
    return accelerator


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: its `blocks`, else its longest `ModuleList`."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        lists = (one for one in model.modules() if isinstance(one, nn.ModuleList))
        blocks = max(lists, key=len, default=nn.ModuleList())
    return list(blocks)


def world_size() -> int:
    """Number of processes that the launcher started, with this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this is rank 0, which writes files and messages."""
    return int(os.environ.get("RANK", "0")) == 0


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


def device_here(device: torch.device) -> torch.device:
    """The GPU of this process, if several share a machine.

    Raises:
        ValueError: the device has an index, or there are fewer GPUs than processes.
    """
    if device.type != "cuda" or world_size() == 1:
        return device
    if device.index is not None:
        fail("--device cuda over several processes", str(device), "Each process takes its own GPU.")
    own, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if own >= count:
        fail("a GPU for each process", f"{count} for {own + 1} or more processes", "Start fewer processes.")
    return torch.device("cuda", own)


def end_with_launcher() -> None:
    """Let the kernel send this process SIGTERM when its parent ends: torchrun's workers would outlive it."""
    if world_size() == 1 or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if not _launcher_answers():  # it ended before
        raise SystemExit(143)


def _launcher_answers() -> bool:
    """Whether torchrun's store, which its workers share, still accepts connections.

    The parent's id is not enough: orphans need not get parent 1, and in a container process 1 may be the launcher.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.getppid() != 1  # the only sign without a store
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10).close()
    except ConnectionRefusedError:
        return False
    except (KeyError, ValueError, OSError):
        pass  # later calls report it
    return True


def require_all_started() -> None:
    """Raise if `accelerate launch` was told to start several processes but started one, as it does on CPUs.

    Then it sets a rendezvous address but no `WORLD_SIZE`.
    """
    if "WORLD_SIZE" in os.environ or not {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
        return
    try:
        before = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return
    if b"MASTER_ADDR=" not in before:
        remedy = "Add --multi_gpu, which starts them on CPUs, too, or use relpos train --devices N."
        fail("as many processes as accelerate launch was told to start", "one", remedy)


def means_of(values: list[float], device: torch.device) -> list[float]:
    """The means of numbers over all processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [one / dist.get_world_size() for one in total.tolist()]


def all_of(own: Any) -> list[Any]:
    """Every process's object, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def number_of(x: Tensor) -> float:
    """The value of a scalar tensor that may be a DTensor."""
    return float(x.full_tensor() if isinstance(x, DTensor) else x)
