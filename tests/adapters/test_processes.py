"""Retrofitted models in several processes, and prepared by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process_of_many import HOW, batch, loss
from torch import Tensor, nn

import relpos
from loaded import Loaded
from models import models
from relpos.adapters.retrofitted import is_swapped

pytestmark = pytest.mark.usefixtures("timm")


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _published() -> dict[str, Tensor]:
    model = models()["t5"].made()
    loss(model, batch()).backward()
    return _gradients(model)


def _assert_equal(own: dict[str, Tensor], published: dict[str, Tensor]) -> None:
    assert own.keys() == published.keys()
    largest = max(float(x.abs().max()) for x in published.values())
    for name, x in published.items():
        assert float((own[name] - x).abs().max()) < 1e-6 * largest, name  # T5 has its softmax in float32
        assert float(own[name].abs().max()) > 0, name


@pytest.mark.slow  # two processes
def test_two_processes_have_the_gradients_of_the_published_model(tmp_path: Path, loaded: Loaded) -> None:
    """With DDP, and then with FSDP2 in the same processes."""
    run = loaded.run(Path(__file__).with_name("process_of_many.py"), tmp_path, processes=2, needs=["models"])
    assert run.returncode == 0, run.stderr[-3000:]
    for how in HOW:
        _assert_equal(torch.load(tmp_path / f"{how}.pt", weights_only=True), _published())


def test_accelerate_prepares_a_retrofitted_model() -> None:
    from accelerate import Accelerator

    model: Any = models()["t5"].made()
    relpos.retrofit(model, border=0, verify=False)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss(prepared, batch()))
    _assert_equal(_gradients(model), _published())
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
        total = loss(prepared, batch())
        accelerator.backward(total)
        assert torch.isfinite(total)
        relpos.restore(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
        own = _gradients(model)
    finally:
        AcceleratorState._reset_state()  # type: ignore[no-untyped-call]
    published, exact = models()["t5"].made(torch.float32), _published()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = loss(published, batch())
    theirs.backward()
    for name, x in _gradients(published).items():
        limit = 2 * float((x - exact[name]).abs().max()) + 1e-3 * max(float(y.abs().max()) for y in exact.values())
        assert float((own[name] - exact[name]).abs().max()) <= limit, name
