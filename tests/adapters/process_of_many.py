"""One of several processes that train a retrofitted T5 for a step: `torchrun process_of_many.py FOLDER`.

Once with DDP, once with FSDP2.

The gradients of all processes' rows, as DDP and FSDP average them, are written by the first; the test holds them
against those of the published model in one process.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import relpos
from models import models, padding, tokens

HOW = ("ddp", "fsdp")
ROWS = 4


def batch() -> dict[str, Tensor]:
    """What all processes train on; each takes its share of the rows."""
    return {
        "input_ids": tokens(ROWS, 21),
        "attention_mask": padding(ROWS, 21),
        "decoder_input_ids": tokens(ROWS, 13, seed=1),
    }


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """A number of which the gradients of a mean over rows are the mean of the gradients of each process."""
    total: Tensor = model(**inputs)[0].square().mean()
    return total


def main(folder: str) -> None:
    """The steps of one process."""
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    for how in HOW:
        whole = _step(how)
        if dist.get_rank() == 0:
            torch.save(whole, Path(folder, f"{how}.pt"))
    gc.collect()  # the last to hold the group would wait for a thread that waits for Python's lock
    dist.barrier()  # gloo aborts a process whose peer has gone
    dist.destroy_process_group()


def _step(how: str) -> dict[str, Any]:
    """The gradients of one step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = models()["t5"].made()
    relpos.retrofit(model, border=0, verify=how == "ddp")
    if how == "ddp":
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        relpos.restore(wrapped)
        with pytest.raises(ValueError, match="Retrofit before fully_shard"):
            relpos.retrofit(wrapped, border=0)
        relpos.retrofit(wrapped, border=0, verify=False)
    loss(wrapped, {name: x[rank::world] for name, x in batch().items()}).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if how == "fsdp" else x for name, x in gradients.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
