"""What two processes do for `test_sharded`: each is one rank, and writes what it found into a file."""

import copy
import json
import os
import pathlib
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from relpos import (
    ALiBi,
    ForgetGate,
    Grid,
    LanguageModel,
    Mask,
    MultiHeadAttention,
    RelativePositionBias,
    RotaryEmbedding,
    VisionTransformer,
    reading_once,
)

RANKS = 2
GRID = Grid(2, 3)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
UNCAST = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)


def layer(position: Any = None) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(16, 2, position=position)


def relative() -> RelativePositionBias:
    torch.manual_seed(2)
    return RelativePositionBias(2, window_size=(2, 3), init_std=1.0)


def model() -> VisionTransformer:
    torch.manual_seed(3)
    return VisionTransformer(
        img_size=(4, 6), patch_size=2, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2,
        position="relative_2d+rotary_2d", position_init_std=1.0,
    )  # fmt: skip


def alike(sharded: nn.Module, whole: nn.Module, *inputs: Any, **named: Any) -> bool:
    """Whether output and gradients are bit for bit those of the whole module in half precision."""
    whole = copy.deepcopy(whole).to(torch.bfloat16)
    ours, theirs = sharded(*inputs, **named), whole(*(x.to(torch.bfloat16) for x in inputs), **named)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    same = torch.equal(ours, theirs)
    for x, y in zip(sharded.parameters(), whole.parameters(), strict=True):
        same = same and torch.equal(x.grad.full_tensor(), y.grad.float())  # type: ignore[union-attr]
    return same


class Stack(nn.Module):
    """Layers, each sharded by itself, that ask a mechanism which belongs to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(relative()), layer(), layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            object.__setattr__(one, "position", self.layers[0].position)
            x = x + one(x, coordinates=GRID)
        return x


def read_once(mesh: Any, x: torch.Tensor) -> bool:
    """Whether two forwards and then two backwards give the sharded stack the gradients of the whole one."""
    whole, sharded = Stack(), Stack()
    for one in sharded.layers:
        fully_shard(one, mesh=mesh, reshard_after_forward=False)
    fully_shard(sharded, mesh=mesh)
    with reading_once(sharded):
        ours = [sharded(x * factor) for factor in (1, 2)]
        theirs = [whole(x * factor) for factor in (1, 2)]
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    for out in (*ours, *theirs):
        out.square().sum().backward()
    pairs = zip(sharded.named_parameters(), whole.parameters(), strict=True)
    return same and all(torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5) for (_, a), b in pairs)


def of_states(mesh: Any) -> bool:
    """Whether a model whose blocks own mechanisms of their hidden states, each sharded with its block, trains alike."""
    torch.manual_seed(6)
    whole = LanguageModel(11, 8, 16, depth=2, num_heads=2, position="t5+fox", shared_position=True)
    sharded, tokens = copy.deepcopy(whole), torch.arange(16).view(2, 8) % 11
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ours, theirs = sharded(tokens), whole(tokens)
    same = torch.allclose(ours, theirs, atol=1e-6)
    for out in (ours, theirs):
        out.square().sum().backward()
    gates = [block.attn.position.parts()[0].fgate_proj.weight for block in sharded.blocks]
    same = same and all(isinstance(x, DTensor) and bool(x.grad.full_tensor().any()) for x in gates)
    pairs = zip(sharded.named_parameters(), whole.parameters(), strict=True)
    return same and all(torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5) for (_, a), b in pairs)


def said(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def run(rank: int, folder: str) -> None:
    """One rank's findings, as `rank.json` in the folder."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    x, images = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(4)), torch.ones(2, 1, 4, 6)
    found: dict[str, Any] = {}

    positions = {"bias": relative(), "rotation": RotaryEmbedding(8, axes=2), "sum": relative() + ALiBi(2)}
    for name, position in positions.items():
        whole = layer(position)
        sharded = fully_shard(copy.deepcopy(whole), mesh=mesh, mp_policy=HALF)
        found[f"inside: {name}"] = alike(sharded, whole, x, coordinates=GRID, mask=Mask.packed(torch.zeros(6).long()))

    whole = layer(ForgetGate(2, 16, init_std=0.5))
    sharded = fully_shard(copy.deepcopy(whole), mesh=mesh, mp_policy=HALF)
    found["inside: states"] = alike(sharded, whole, x, mask=Mask.causal())
    found["model: of states"] = of_states(mesh)

    for name in ("bias", "rotation"):
        sharded = fully_shard(layer(), mesh=mesh, mp_policy=HALF)
        found[f"across: {name}"] = said(partial(sharded, x, position=positions[name].terms(GRID)))

    for name, policy in (("whole", None), ("blocks uncast", UNCAST), ("blocks cast", HALF)):
        whole, sharded = model(), model()
        for block in sharded.blocks if policy is not None else ():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(sharded, mesh=mesh, mp_policy=HALF)
        if name == "blocks cast":
            found[f"model: {name}"] = said(partial(sharded, images))
        else:
            found[f"model: {name}"] = alike(sharded, whole, images)

    found["reading once"] = read_once(mesh, x)

    for name in ("to_empty", "assign"):
        torch.manual_seed(5)
        whole = model()
        with torch.device("meta"):
            sharded = model()
        fully_shard(sharded, mesh=mesh)
        if name == "to_empty":
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(sharded.to_empty(device="cpu"), whole.state_dict(), options=options)
        else:
            likes = sharded.state_dict()
            parts = {
                key: distribute_tensor(x, mesh, likes[key].placements) if isinstance(likes[key], DTensor) else x
                for key, x in whole.state_dict().items()
            }
            sharded.load_state_dict(parts, assign=True)
        found[f"meta: {name}"] = bool(torch.allclose(sharded(images), whole(images), atol=1e-6))

    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(os.environ["RANK"]), sys.argv[1])
