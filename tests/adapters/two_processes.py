"""What each of two processes does for `test_processes.py`: one rank, with half of a batch.

Families whose position was replaced take a step under DDP, and a retrofitted T5 one under DDP and one under FSDP2.
Models whose tokens are spread over both have half of each sequence instead.
`RANK.json` in the folder says how far their gradients are from those of one process with the whole batch, of the
largest there is, and how many of position there are.
"""

import gc
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import relpos
from models import models, padding, tokens
from relpos.adapters.common.libraries import imported


def translation() -> dict[str, Tensor]:
    """What T5 trains on."""
    inputs = {"input_ids": tokens(4, 21), "attention_mask": padding(4, 21)}
    return inputs | {"decoder_input_ids": tokens(4, 13, seed=1)}


def loss(out: Tensor) -> Tensor:
    """A number whose gradients are the mean of those of each process."""
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out[0].shape)
    return (out * weights).square().sum() / out.shape[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, of all parameters that have one; whole where they are sharded."""
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def apart(came: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Their largest difference, of the largest that is wanted."""
    assert came.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    return max(float((came[name] - x).abs().max()) for name, x in wanted.items()) / largest


def _replaced(family: Any, rows: slice) -> tuple[float, int]:
    whole, model = family.replaced(), family.replaced()
    for key in _unused(family, whole):  # by the published model, too: none is of position
        assert "positions." not in key
        whole.get_parameter(key).requires_grad_(False)
        model.get_parameter(key).requires_grad_(False)
    loss(family.called(whole)).backward()
    parallel = DistributedDataParallel(model)  # whose hooks end with it
    loss(family.called(parallel, rows)).backward()
    came = gradients(model)
    return apart(came, gradients(whole)), sum("positions." in key and bool(x.any()) for key, x in came.items())


def _unused(family: Any, model: nn.Module) -> list[str]:
    named = {key: x for key, x in model.named_parameters() if x.requires_grad}
    found = torch.autograd.grad(loss(family.called(model)), list(named.values()), allow_unused=True)
    return [key for key, x in zip(named, found, strict=True) if x is None]


def _ddp(model: nn.Module) -> nn.Module:
    relpos.retrofit(model, border=0)
    return DistributedDataParallel(model)


def _fsdp(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            fully_shard(block, mesh=mesh)
    wrapped: nn.Module = fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="Retrofit before fully_shard"):
        relpos.retrofit(wrapped, border=0)
    relpos.retrofit(wrapped, border=0, verify=False)
    return wrapped


def _retrofitted(wrap: Callable[[nn.Module], nn.Module], rows: slice) -> tuple[float, int]:
    published, model = (models()["t5"].made() for _ in range(2))
    loss(published(**translation())[0]).backward()
    wrapped = wrap(model)
    loss(wrapped(**{name: x[rows] for name, x in translation().items()})[0]).backward()
    came = gradients(model)
    assert all(bool(x.any()) for x in came.values())
    return apart(came, gradients(published)), sum("relative_attention_bias" in key for key in came)


def run(rank: int, folder: str) -> None:
    """The steps of one process."""
    imported("timm")
    imported("transformers")
    import spread_models
    from replaced_models import FAMILIES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    rows = slice(2 * rank, 2 * rank + 2)
    found = {name: _replaced(family, rows) for name, family in FAMILIES.items()}
    found |= {f"retrofitted T5, {wrap.__name__}": _retrofitted(wrap, rows) for wrap in (_ddp, _fsdp)}
    found |= {f"{name}, spread": (apart, 1) for name, apart in spread_models.compare(dist.group.WORLD)}
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))
    gc.collect()  # the last to hold the group would wait for a thread that waits for Python's lock
    dist.barrier()  # gloo aborts a process whose peer has gone
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(os.environ["RANK"]), sys.argv[1])
