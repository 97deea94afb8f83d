"""A model's parameters by part, counted from the module itself.

Published counts often leave out biases and the output projection. At width 96 the fused QKV projection has 96 x 288 =
27,648 weights *and* 288 biases; a 7 x 7 window with 4 heads has 13 x 13 x 4 = 676 bias values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from relpos.core.checks import fail, shape_of
from relpos.layers import GatedMlp, Mlp, MultiHeadAttention, PatchEmbedding
from relpos.position.base.wrapped import position_parameters

_PARTS: dict[type[nn.Module], str] = {
    PatchEmbedding: "patch embedding",
    nn.Embedding: "token embedding",
    Mlp: "mlp",
    GatedMlp: "mlp",
    nn.LayerNorm: "norm",
    nn.RMSNorm: "norm",
}


@dataclass(frozen=True)
class Count:
    """Parameters of one part: `weights` have two or more dimensions or belong to position, `biases` the rest."""

    weights: int = 0
    biases: int = 0

    @property
    def total(self) -> int:
        """Weights and biases together."""
        return self.weights + self.biases

    def __add__(self, other: Count) -> Count:
        return Count(self.weights + other.weights, self.biases + other.biases)


def count_parameters(model: nn.Module) -> dict[str, Count]:
    """Count parameters by part, in the model's order. Each counts once; the counts add up to the total.

    Parts: "patch embedding", "token embedding", "prefix tokens", "position", "attention qkv", "attention projection",
    "mlp", "norm", "head", and "other". A head tied to the token embedding counts there.

    Args:
        model: any module.

    Returns:
        Part to `Count`, which has `weights`, `biases` and `total`.

    Raises:
        ValueError: `model` is not a module.

    Examples:
        >>> counts = relpos.count_parameters(relpos.VisionTransformer(embed_dim=96, num_heads=4, depth=1))
        >>> counts["attention qkv"]
        Count(weights=27648, biases=288)
    """
    if not isinstance(model, nn.Module):
        fail("a module to count", shape_of(model), "Build the model first.")
    counts: dict[str, Count] = {}
    seen: set[nn.Parameter] = set()
    position = position_parameters(model)

    def walk(module: nn.Module, part: str) -> None:
        part = next((own for kind, own in _PARTS.items() if isinstance(module, kind)), part)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            own = "prefix tokens" if name in ("prefix_tokens", "cls_token") else part
            own = "position" if parameter in position else own
            is_bias = name.endswith("bias") and own != "position"
            count = Count(biases=parameter.numel()) if is_bias else Count(weights=parameter.numel())
            counts[own] = counts.get(own, Count()) + count
        for name, child in module.named_children():
            inner = part
            if isinstance(module, MultiHeadAttention):
                inner = {"qkv": "attention qkv", "proj": "attention projection"}.get(name, part)
            elif name == "head" and part == "other":
                inner = "head"
            walk(child, inner)

    walk(model, "other")
    return counts
