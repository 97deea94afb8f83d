"""The processes that share a sequence: who they are, whether they agree, and the one line where one of them is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from relpos.core.checks import fail, shape_of
from relpos.core.tree import fields_of


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh, numbered 0 to `size` - 1 within it.

    Attributes:
        group: their process group.
        rank: this process's number.
        size: how many there are, R.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh | dist.ProcessGroup) -> Ranks:
        """The ranks of a mesh of one dimension, or of a process group.

        Raises:
            ValueError: anything else, or a mesh that this process is not in.
        """
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                names = mesh.mesh_dim_names
                remedy = (
                    f'Pass one of its dimensions, such as mesh["{names[-1]}"].' if names else "Name its dimensions."
                )
                fail("a mesh of one dimension", f"one of {mesh.ndim}", remedy)
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            remedy = 'Make one: torch.distributed.device_mesh.init_device_mesh("cpu", (2,)).'
            fail("mesh to be a DeviceMesh or a ProcessGroup", shape_of(mesh), remedy)
        rank = dist.get_rank(mesh)
        if rank < 0:
            fail("a mesh that this process is in", "another", "Only its ranks call with it.")
        return cls(mesh, rank, dist.get_world_size(mesh))

    def peer(self, rank: int) -> int:
        """The number of one of the ranks among all processes."""
        return dist.get_global_rank(self.group, rank)

    def of_first(self, x: Tensor) -> Tensor:
        """What the first rank has in the place of a tensor."""
        if self.size == 1:
            return x
        found = x.clone()
        with self.watched():
            dist.broadcast(found, src=self.peer(0), group=self.group)
        return found

    def agree(self, facts: Mapping[str, object], device: torch.device, error: Exception | None = None) -> None:
        """Raise on every rank where one has raised, or where they differ in a fact.

        Args:
            facts: by name, what must be the same on all ranks; of plain values.
            device: where the group can send from.
            error: what this rank is about to raise.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        own = torch.tensor([int(error is not None), *map(_number, facts.values())], device=device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        with self.watched():
            dist.all_gather(every, own, group=self.group)
        if error is not None:
            raise error
        rows = torch.stack(every).tolist()
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            fail("arguments that all ranks accept", f"an error of rank {failed[0]}", "Its own message says which.")
        for column, (name, value) in enumerate(facts.items(), start=1):
            other = next((rank for rank, row in enumerate(rows) if row[column] != rows[self.rank][column]), None)
            if other is not None:
                said = str(value) if len(str(value)) <= 200 else f"{str(value)[:197]}..."
                came = f"{said} on rank {self.rank} and another on rank {other}"
                remedy = "Each rank holds an equal share of the tokens; all else is that of the whole sequence."
                fail(f"{name} alike on all {self.size} ranks", came, remedy)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context for what is sent and received: where a rank has ended, one line says so.

        Raises:
            ConnectionError: a rank has ended, or has not answered within the group's timeout.
        """
        try:
            yield
        except RuntimeError as error:  # gloo's own, and torch.distributed's
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            said = said.rpartition("] ")[2] if said.startswith("[") else said
            said = said.partition(". ")[0]
            timed_out = any(word in str(error).lower() for word in ("timed out", "timeout"))
            why = "A rank has ended, or is later than the group's timeout" if timed_out else "Another rank has ended"
            raise ConnectionError(
                f"expected an answer from each of {self.size} ranks; rank {self.rank} got: {said}. "
                f"{why}: its own message says why."
            ) from None


def _number(value: object) -> int:
    """A plain value as a number of 62 bits, the same in every process."""
    if isinstance(value, int):
        return int(value)
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2


def structure(x: object) -> str:
    """What a position, coordinates or a mask are, without the numbers in their tensors; the same in every process."""
    if isinstance(x, Tensor):
        learned = ", learned" if x.requires_grad else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{learned}"
    if isinstance(x, nn.Module):
        return _named(x, {"": "+".join(type(one).__name__ for one in x.modules())} | dict(x.named_parameters()))
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(structure, x))}]"
    if is_dataclass(x) and not isinstance(x, type):
        return _named(x, {name: one for name, one in fields_of(x).items() if one is not None})
    return repr(x) if isinstance(x, int | float | str | None) else type(x).__name__


def _named(x: object, of: Mapping[str, object]) -> str:
    return f"{type(x).__name__}({', '.join(f'{name}={structure(one)}' for name, one in of.items())})"


def rank_ordered_sum(parts: Tensor) -> Tensor:
    """The sum over the first axis, one rank after the other, in float32 or wider and then in the dtype of the parts."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
