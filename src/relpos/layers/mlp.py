"""The feed-forward part of a block: Linear, GELU, dropout, Linear, dropout."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core.checks import require_int, require_probability, require_tokens


class Mlp(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        in_features: width of a token, E.
        hidden_features: width between the layers.
        drop: dropout after each layer.
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
        require_tokens(x, self.fc1.in_features, self.fc1.weight)
        x = self.drop(self.act(self.fc1(x)))
        x = self.drop(self.fc2(x))
        return x
