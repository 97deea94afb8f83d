"""Retrofitted and replaced models in two processes, and prepared by accelerate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from replaced_models import FAMILIES
from spread_models import CASES
from torch import Tensor
from two_processes import apart, gradients, loss, translation

import relpos
from loaded import Loaded
from models import models
from relpos.adapters.common.retrofitted import is_swapped

FLOAT32 = 1e-6  # T5 has its softmax in float32


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path, loaded: Loaded) -> None:
    script = Path(__file__).with_name("two_processes.py")
    done = loaded.run(script, tmp_path, processes=2, needs=["models"])
    assert done.returncode == 0, done.stderr[-3000:]
    limits = dict.fromkeys(FAMILIES, 1e-9) | {f"retrofitted T5, {how}": FLOAT32 for how in ("_ddp", "_fsdp")}
    limits |= {f"{name}, spread": 1e-12 for name in CASES}
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == limits.keys()
        for name, (difference, learned) in found.items():
            assert difference < limits[name], name
            assert learned, name


def _published() -> dict[str, Tensor]:
    model = models()["t5"].made()
    loss(model(**translation())[0]).backward()
    return gradients(model)


def test_accelerate_prepares_a_retrofitted_model() -> None:
    from accelerate import Accelerator

    model: Any = models()["t5"].made()
    relpos.retrofit(model, border=0, verify=False)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss(prepared(**translation())[0]))
    assert apart(gradients(model), _published()) < FLOAT32
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer.step()
    assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    relpos.restore(plain)
    assert not any(is_swapped(one) for one in plain.modules())


def test_mixed_precision_of_accelerate() -> None:
    """It gives the model a forward of its own, which is taken off before restoring."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # type: ignore[no-untyped-call]  # the precision is set once a process
    model = models()["t5"].made(torch.float32)
    relpos.retrofit(model, border=0, verify=False)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        total = loss(prepared(**translation())[0])
        accelerator.backward(total)
        assert torch.isfinite(total)
        relpos.restore(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
        own = gradients(model)
    finally:
        AcceleratorState._reset_state()  # type: ignore[no-untyped-call]
    exact, published = _published(), models()["t5"].made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total = loss(published(**translation())[0])
    total.backward()
    rounding = 1e-3 * max(float(x.abs().max()) for x in exact.values())
    for name, x in gradients(published).items():
        limit = 2 * float((x - exact[name]).abs().max()) + rounding
        assert float((own[name] - exact[name]).abs().max()) <= limit, name
