"""A vision transformer of every mechanism through `torch.compile(fullgraph=True)`, value and gradients against eager.

    python tests/models/compile_models.py

A script, not a test: it runs apart from the other tests, because the compiler must see relpos as users have it, without
the shape checks. One line a model is printed, and the exit status is the number that failed. The backend traces
forward and backward whole and generates no code; `tests/attention/compile_terms.py` has inductor.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import torch
from torch import Tensor

from relpos import RelativePositionBias, Sequence, VisionTransformer, attention
from relpos.position import presets

POSITIONS = [name for name, preset in presets().items() if 2 in preset.token_axes]
CASES = {
    **{f"{name}, token, any batch size": (name, 1, True) for name in POSITIONS},
    "relative_2d, token": ("relative_2d", 1, False),
    "relative_2d, no token": ("relative_2d", 0, False),
}
"""Position, class token, and whether one graph serves every batch size."""


DYNAMIC_ATTENTION = "attention, any shape"


def outcome(model: torch.nn.Module, run: torch.nn.Module, images: Tensor) -> list[Tensor]:
    scores = run(images)
    upstream = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    return [scores.detach(), *torch.autograd.grad(scores, list(model.parameters()), upstream)]


def compare(name: str) -> None:
    """Raise unless the compiled model gives what the eager one gives."""
    position, token, dynamic = CASES[name]
    torch.manual_seed(0)
    model = VisionTransformer(
        (4, 6), 2, 1, 3, "token" if token else "max", embed_dim=8, depth=1, num_heads=2, mlp_ratio=2.0,
        class_token=bool(token), position=position, position_init_std=0.5
    )  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 5) if dynamic else (2,):
        images = torch.randn(batch, 1, 4, 6)
        for ours, wanted in zip(outcome(model, compiled, images), outcome(model, model, images), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{graphs} graphs"


def attention_of_any_shape() -> None:
    """Batch, heads, groups and length are symbols while tracing, grouped keys included."""
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    bias = RelativePositionBias(4, seq_len=9, init_std=0.5)
    for batch, n in ((2, 5), (3, 7)):
        q, k, v = torch.randn(batch, 4, n, 8), torch.randn(batch, 2, n, 8), torch.randn(batch, 2, n, 8)
        ours, wanted = (run(q, k, v, position=bias, queries=Sequence(n)) for run in (compiled, attention))
        torch.testing.assert_close(ours, wanted)


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for name in sys.argv[1:] or [*CASES, DYNAMIC_ATTENTION]:
        try:
            attention_of_any_shape() if name == DYNAMIC_ATTENTION else compare(name)
            print(f"ok      {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the compiler itself
    sys.exit(main())
