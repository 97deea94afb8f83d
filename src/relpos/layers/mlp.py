"""The feed-forward layers of a block: two linear layers with a GELU, or SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core.checks import require_int, require_probability, require_tokens


class Mlp(nn.Module):
    """Two linear layers with a GELU between them.

    `[B, N, E]` to `[B, N, E]`.

    Args:
        in_features: width of a token, E.
        hidden_features: width between the layers.
        drop: dropout probability after each layer.

    Raises:
        ValueError: a width below 1, or an invalid probability; in use, tokens of another width.

    Examples:
        >>> relpos.Mlp(32, 128)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(self, in_features: int, hidden_features: int, drop: float = 0.0) -> None:
        super().__init__()
        require_int(in_features, "in_features", at_least=1)
        require_int(hidden_features, "hidden_features", at_least=1)
        require_probability(drop, "drop")
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        require_tokens(x, self.fc1.in_features, self.fc1.weight, jagged=True)
        x = self.drop(self.act(self.fc1(x)))
        x = self.drop(self.fc2(x))
        return x


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer 2020): `fc2(silu(gate) * value)`, with gate and value from one linear layer, without biases.

    It has three matrices and `Mlp` two; `gated_width` gives the width with as many parameters.

    Args:
        in_features: width of a token, E.
        hidden_features: width of the gate and of the value.
        drop: dropout probability of the gated value and of the output.

    Raises:
        ValueError: a width below 1, or an invalid probability; in use, tokens of another width.

    Examples:
        >>> relpos.GatedMlp(32, 88)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(self, in_features: int, hidden_features: int, drop: float = 0.0) -> None:
        super().__init__()
        require_int(in_features, "in_features", at_least=1)
        require_int(hidden_features, "hidden_features", at_least=1)
        require_probability(drop, "drop")
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=False)  # rows of the gate come first
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=False)

    def forward(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B N E"]:
        require_tokens(x, self.fc1.in_features, self.fc1.weight, jagged=True)
        gate, value = self.fc1(x).chunk(2, dim=-1)
        x = self.drop(F.silu(gate) * value)
        x = self.drop(self.fc2(x))
        return x


def gated_width(dim: int, mlp_ratio: float) -> int:
    """Two thirds of `mlp_ratio * dim`, rounded to the nearest multiple of 8, at least 8."""
    return 8 * max(1, round(mlp_ratio * dim / 12))
