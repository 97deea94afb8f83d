"""Models of several mechanisms through `torch.compile(fullgraph=True)`, value and gradients against eager.

    python tests/models/compile_models.py

A script, not a test: it runs apart from the other tests, because the compiler must see relpos as users have it, without
the shape checks. One line a model is printed, and the exit status is the number that failed. The backend traces the
forward whole, and of one model the backward, and generates no code; `tests/engines/compile_terms.py` has the backward
of every term and of symbols, and inductor.
"""

import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from relpos import (
    KeyValueCache,
    LanguageModel,
    Mask,
    RelativePositionBias,
    Sequence,
    SwinTransformer,
    VisionTransformer,
    attention,
)

CASES = {
    "image, learned+relative_2d": ("learned+relative_2d", None),
    "windows, relative_2d": ("relative_2d", False),
    "text, rotary_1d": ("rotary_1d", True),
    "text, t5+shaw+cope": ("t5+shaw+cope", False),
}
"""Position, and which sizes are symbols: all (True), the batch alone (None: a third of the time), or none. Where the
batch is one, one graph serves every batch size. One preset a kind of terms: on tokens and line biases with a
prefix, rotations, line biases under a causal mask, vectors on queries and values, row rules. Each term alone is
compiled in `tests/engines/compile_terms.py`."""

TO_THE_END = "text, t5+shaw+cope"
DYNAMIC_ATTENTION = "attention, any shape"
DECODING = "a token at a time"
GRAPHS = 2
"""What decoding compiles, however many tokens: a prompt, and a token after any number of others."""


def outcome(model: torch.nn.Module, run: Callable[..., Tensor], given: Tensor) -> list[Tensor]:
    scores = run(given)
    upstream = torch.linspace(-1, 1, scores.numel()).view_as(scores)
    return [scores.detach(), *torch.autograd.grad(scores, list(model.parameters()), upstream)]


def build(name: str, position: str) -> tuple[torch.nn.Module, Callable[[int], Tensor]]:
    """A model, and what gives it a batch."""
    if name.startswith("text"):
        small = {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_ratio": 2.0}
        text = LanguageModel(7, 6, **small, position=position, position_init_std=0.5)  # type: ignore[arg-type]
        return text, lambda batch: torch.randint(7, (batch, 6))
    if name.startswith("windows"):
        windows = SwinTransformer(
            16, 2, 1, 3, embed_dim=8, depths=(2, 1), num_heads=(1, 2), window_size=4, position_init_std=0.5
        )
        return windows, lambda batch: torch.randn(batch, 1, 16, 16)
    small = {"embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2.0}
    image = VisionTransformer((4, 6), 2, 1, 3, **small, position=position, position_init_std=0.5)  # type: ignore[arg-type]
    return image, lambda batch: torch.randn(batch, 1, 4, 6)


def compare(name: str) -> None:
    """Raise unless the compiled model gives what the eager one gives."""
    position, dynamic = CASES[name]
    torch.manual_seed(0)
    model, some = build(name, position)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = "aot_eager" if name == TO_THE_END else "eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch in (2,) if dynamic is False else (2, 5):
        given = some(batch)
        if dynamic is None:
            torch._dynamo.mark_dynamic(given, 0)
        for ours, wanted in zip(outcome(model, compiled, given), outcome(model, model, given), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{graphs} graphs"


def attention_of_any_shape() -> None:
    """Batch, heads, groups and length are symbols while tracing, grouped keys included."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=True)
    bias = RelativePositionBias(4, seq_len=9, init_std=0.5)
    for batch, n in ((3, 5), (2, 7)):  # at first all sizes differ: equal ones are one symbol
        q, k, v = torch.randn(batch, 4, n, 8), torch.randn(batch, 2, n, 8), torch.randn(batch, 2, n, 8)
        ours, wanted = (run(q, k, v, position=bias, queries=Sequence(n)) for run in (compiled, attention))
        torch.testing.assert_close(ours, wanted)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1, f"{graphs} graphs"


class OwnDecoder(torch.nn.Module):
    """A layer of a person's own with a cache: attention under a causal mask whose order says where new tokens stand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.position = torch.nn.Linear(8, 24), RelativePositionBias(2, seq_len=20, init_std=0.5)

    def forward(self, x: Tensor, cache: KeyValueCache) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        k, v = cache.layers[0].extend(k, v)
        n, m = q.shape[2], k.shape[2]
        order = torch.arange(m)
        mask = Mask.causal(order[m - n :], order)
        queries, keys = Sequence(n, start=m - n), Sequence(m)
        return attention(q, k, v, position=self.position, queries=queries, keys=keys, mask=mask)


def decoding_a_token_at_a_time() -> None:
    """Two graphs for prompts of two lengths and the tokens after them, in a model made from states and in a layer of a
    person's own; the guide on compiling has a model with T5's bias, and generates."""
    from_states = LanguageModel(7, 32, embed_dim=8, depth=2, num_heads=2, num_kv_heads=1, position="cable~carope")
    models: dict[str, torch.nn.Module] = {"own": OwnDecoder(), "from states": from_states.eval()}
    for name, model in models.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        runs: tuple[Callable[..., Tensor], ...] = compiled, model
        text = torch.randn(2, 10, 8) if name == "own" else torch.randint(7, (2, 10))
        for prompt in (3, 5):
            caches = KeyValueCache(2), KeyValueCache(2)
            with torch.no_grad():
                for x in (text[:, :prompt], *text[:, prompt:].split(1, dim=1)):
                    ours, wanted = (run(x, cache=cache) for run, cache in zip(runs, caches, strict=True))
                    torch.testing.assert_close(ours, wanted)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == GRAPHS, f"{graphs} graphs, {name}"


ALONE = {DYNAMIC_ATTENTION: attention_of_any_shape, DECODING: decoding_a_token_at_a_time}


def failing(names: list[str], run: Callable[[str], None]) -> int:
    """Run each, print a line of it, and count those that raise."""
    torch.set_num_threads(1)
    failed = 0
    for name in names:
        began = time.process_time()
        try:
            run(name)
            print(f"ok      {name} ({time.process_time() - began:.1f} s)", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the compiler itself
    sys.exit(failing(sys.argv[1:] or [*CASES, *ALONE], lambda name: ALONE[name]() if name in ALONE else compare(name)))
