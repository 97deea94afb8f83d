"""Models through `torch.export.export` with sizes left open, against eager at other sizes.

    python tests/models/export_models.py [CASE ...]

A script, not a test: it runs apart from the other tests, because what traces must see relpos as users have it, without
the shape checks. One line a program is printed, and the exit status is the number that failed.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compile_models import failing
from torch import Tensor, nn
from torch.export import Dim, export

import relpos
from relpos import (
    LanguageModel,
    Mask,
    Positions,
    Sequence,
    SwinTransformer,
    T5Bias,
    VisionTransformer,
    attention,
)
from relpos.adapters.common.libraries import imported

BATCH, LENGTH = Dim("batch", max=1024), Dim("length", max=4096)
CONTEXT = 24
"""Of models of text: what they are built for, and what those are bounded by that have a table of it."""
Inputs = Callable[[int, int], tuple[Tensor, ...]]
"""Of a batch size and a length."""


@dataclass(frozen=True)
class Case:
    """What is exported.

    Attributes:
        build: the model.
        inputs: its arguments.
        open: what is left open of each of their axes.
        others: sizes that the program is run at: the least, and more than the example has. 600 tokens are more scores
            than `auto` prefers a dense engine for, and more pairs than a row rule is called for at once.
        beyond: sizes that the model has no numbers for.
        strict: whether Dynamo traces it.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs
    open: tuple[dict[int, Any], ...]
    others: tuple[tuple[int, int], ...] = ((2, 2), (3, 600))
    beyond: tuple[tuple[int, int], ...] = ()
    strict: bool = False


def text(position: Any, *, strict: bool = False, bounded: bool = False) -> Case:
    def build() -> nn.Module:
        small = {"embed_dim": 16, "depth": 1, "num_heads": 4, "mlp_ratio": 2.0}
        return LanguageModel(7, CONTEXT, **small, position=position, position_init_std=0.5)  # type: ignore[arg-type]

    length = Dim("length", max=CONTEXT) if bounded else LENGTH
    others, beyond = (((2, 2), (3, CONTEXT)), ((2, CONTEXT + 1),)) if bounded else (((2, 2), (3, 600)), ())
    return Case(build, lambda b, n: (torch.randint(7, (b, n)),), ({0: BATCH, 1: length},), others, beyond, strict)


class Own(nn.Module):
    """A layer of a person's own: grouped keys, packed documents, whose lines have a batch axis, and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.position = T5Bias(4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        n = q.shape[2]
        queries = Positions(torch.arange(n).expand(q.shape[0], n), low=0, high=1000)
        mask = Mask.packed(documents) & Mask.window(3, 0)
        return attention(q, k, v, position=self.position, queries=queries, mask=mask)


def own() -> Case:
    def inputs(b: int, n: int) -> tuple[Tensor, ...]:
        heads = [torch.randn(b, count, n, 8) for count in (4, 2, 2)]
        return (*heads, torch.arange(n) // 7 - torch.arange(b)[:, None] % 2)  # some of them padding

    # Not by names: torch 2.10 and 2.11 cannot prove of these that repeated heads lie side by side at every length.
    axes = (*({0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in range(3)), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    return Case(Own, inputs, axes)


def image(model: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(model, lambda b, n: (torch.randn(b, *shape),), ({0: BATCH},), ((1, 0), (5, 0)))


def vit() -> nn.Module:
    return VisionTransformer(
        (4, 6), 2, 1, 3, embed_dim=8, depth=1, num_heads=2, position="learned+relative_2d", position_init_std=0.5
    )


def swin() -> nn.Module:
    return SwinTransformer(16, 2, 1, 3, embed_dim=8, depths=(2,), num_heads=(2,), window_size=3, position_init_std=0.5)


class Replaced(nn.Module):
    """A model of others with another mechanism, and its first output."""

    def __init__(self, model: nn.Module, position: str) -> None:
        super().__init__()
        self.model = model
        relpos.replace_position(model, position, init_std=0.5)

    def forward(self, x: Tensor) -> Any:
        out: Any = self.model(x)
        return out if isinstance(out, Tensor) else out[0]


def bert() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.BertConfig(
        vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16,
        max_position_embeddings=1024,
    )  # fmt: skip
    return Replaced(transformers.BertModel(config, add_pooling_layer=False), "t5")


CASES = {
    "text, learned+relative_1d": text("learned+relative_1d", bounded=True),
    "text, none, strict": text("none", strict=True),
    "text, rotary_dynamic_ntk": text("rotary_dynamic_ntk"),
    "text, cope+shaw+deberta+selective_rope": text("cope+shaw+deberta+selective_rope"),
    "attention, t5": own(),
    "image, learned+relative_2d": image(vit, 1, 4, 6),
    "windows, relative_2d": image(swin, 1, 16, 16),
    "replaced, BERT": Case(bert, lambda b, n: (torch.randint(7, (b, n)),), ({0: BATCH, 1: Dim("length", max=1024)},)),
}
"""One a kind of terms: tables of tokens and lines, rotations scaled by the length, row rules, vectors on queries and
values, and on keys; hidden states; masks; images; models of others. Dynamo takes twice the time, and finds out of the
models what `compile_models.py` finds out: it traces one, of which it could not say whether a program is exported."""


def compare(case: Case) -> None:
    """Raise unless the program gives what eager gives, and is of PyTorch's own operators."""
    torch.manual_seed(0)
    model = case.build().eval()
    program = export(model, case.inputs(2, 5), dynamic_shapes=case.open, strict=case.strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("relpos" in name for name in called), called
    run = program.module()
    with torch.no_grad():
        for sizes in case.others:
            given = case.inputs(*sizes)
            torch.testing.assert_close(run(*given), model(*given), rtol=1e-5, atol=1e-5)
        for sizes in case.beyond:
            try:
                run(*case.inputs(*sizes))
            except (AssertionError, RuntimeError):  # of PyTorch, by version
                continue
            raise ValueError(f"it computes something at {sizes}")


class Lengths(nn.Module):
    """Attention with grouped keys in a model that torch.jit traces, where the sizes of tensors are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.position = T5Bias(4)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return attention(q, k, k, position=self.position, queries=Sequence(int(q.shape[2])))


@torch.no_grad()
def traced_by_jit() -> None:
    for n in (5, 20):  # a bias written out, and one that is read as a view
        model, q, k = Lengths(), torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8)
        wanted = model(q, k)  # before: what is kept from then on, it traces alike each time
        torch.testing.assert_close(torch.jit.trace(model, (q, k))(q, k), wanted)


JIT = "torch.jit.trace"
RUNS = [*CASES, JIT]


def run(name: str) -> None:
    traced_by_jit() if name == JIT else compare(CASES[name])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what traces
    sys.exit(failing(sys.argv[1:] or RUNS, run))
