"""What two processes do for `test_replace_in_use`: each is one rank, and takes half of a batch."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from relpos.adapters.libraries import imported


def run(rank: int, folder: str) -> None:
    """Each family's largest difference of a gradient, of the largest there is, from one process with the whole batch;
    and whether the mechanisms have one. They are written to `rank.json` in the folder."""
    imported("timm")
    imported("transformers")
    from replaced_models import FAMILIES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"world": dist.get_world_size()}
    for name, family in FAMILIES.items():
        whole, model = family.replaced(), family.replaced()
        unused = _unused(family, whole)
        for one in (whole, model):
            for key in unused:
                one.get_parameter(key).requires_grad_(False)
        _loss(family.called(whole)).backward()
        parallel = DistributedDataParallel(model)
        _loss(family.called(parallel, slice(2 * rank, 2 * rank + 2))).backward()
        wanted = {key: x.grad for key, x in whole.named_parameters() if x.grad is not None}
        came = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        assert wanted.keys() == came.keys()
        largest = max(float(x.abs().max()) for x in wanted.values())
        apart = max(float((came[key] - x).abs().max()) for key, x in wanted.items()) / largest
        learned = [key for key, x in came.items() if "positions." in key and bool(x.any())]
        found[name] = (apart, len(learned))
    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    # Were the wrapper the last to hold the group, its end would wait for a thread that waits for Python's lock.
    del parallel, model, whole
    gc.collect()
    dist.destroy_process_group()


def _loss(out: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out[0].shape)
    return (out * weights).square().sum() / out.shape[0]


def _unused(family: Any, model: Any) -> list[str]:
    """Parameters that a call leaves out in the published model too: none of position."""
    named = {key: x for key, x in model.named_parameters() if x.requires_grad}
    found = torch.autograd.grad(_loss(family.called(model)), list(named.values()), allow_unused=True)
    unused = [key for key, x in zip(named, found, strict=True) if x is None]
    assert not any("positions." in key for key in unused)
    return unused


if __name__ == "__main__":
    run(int(os.environ["RANK"]), sys.argv[1])
