"""Selective RoPE: a rotation whose angles are projected from content, pair by pair, and added up over the sequence.

    z[t]           = W1 (x[t] normed to length 1, each of H slices by itself)          `rank` numbers
    phi[h, t, p]   = <W2[h, p], z[t]>
    step[h, t, p]  = sum of c[h, p, k] phi[h, t - k, p] over k from 0 to K - 1          a short causal convolution
    angle[h, t, p] = base ** (-p / P) * sum of step[h, s, p] over s up to t             pair p = 0 ... P - 1

x are the hidden states that q, k and v are projected from. Queries and keys turn by the angle of their token, in either
direction, so that a score depends on what lies between the two. Where each step is 1, it is RoPE.

The sums run over the keys in their order, each row of a batch for itself, and a query stands at its place among them.
What a key contributes is phi, before the convolution: P numbers a head in the cache. Only its end may be cut: the first
K - 1 tokens after a cut at the front would lose what the convolution takes from before. The convolution takes in a
token only where its position is k below the present one's: the first token of a document or after padding, which counts
from 0 again in `Positions`, does not see what stands before it in the row. Tokens of one document stand side by side.
Prefix tokens are not turned and add nothing.

Source: Movahedi et al. 2026 ("Selective Rotary Position Embedding", ICLR 2026, arXiv 2511.17388) and the authors' code,
`SelectiveRoPE`, with the settings of its published configurations: projections of low rank (32) without a bias, the
convolution of 4 tokens without an activation, fixed temperatures with base 500,000, no phase gate, no phase bias. Their
options (a phase gate, a phase bias, learned or other temperatures, a projection of full rank) are not implemented, nor
is the norm of q and k after the rotation, which is no position. Their gated linear layers have a decay beside it; in
softmax attention that is a forget gate: `selective_rope+fox`.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Positions, Rotation, Terms, at_least_float32, constant
from relpos.core.checks import fail, require_int, require_number
from relpos.core.rotation import require_layout
from relpos.position.base.angles import frequencies
from relpos.position.base.from_states import FromStates, projected
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.running_sums import running_angles
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std

_NOWHERE = -(2**62)
"""The place of what stands before the first token, which is next to no other."""


class SelectiveRoPE(FromStates):
    """Rotation by angles that are projected from hidden states and added up over the sequence, a number a pair.

    `angle[t, p] = base ** (-p / P) * sum of step[s, p]` over tokens s up to t. A step is a causal convolution of
    `phi_proj(x)`, x the states that q, k and v are projected from, `states=` of attention, normed by slices.

    Source: Movahedi et al. 2026 (Selective RoPE) and its code, without gate and bias, as its configurations are.

    Args:
        num_heads: query heads, H; a divisor of `embed_dim`.
        head_dim: width of a head, D; where it is odd, its last number is not turned.
        embed_dim: width of a hidden state, E.
        rank: the numbers that a state is projected to, from which come the steps of all heads.
        conv_size: K, the tokens that the convolution takes in, the present one included; 1 for its own alone.
        base: the slowest pair turns by nearly 1 / base of its sum.
        layout: "half", as published, or "interleaved", see `relpos.rotate`.
        init_std: standard deviation that all weights start from; 0 for zeros.

    Attributes:
        phi_proj: W1 `[E -> rank]` and W2 `[rank -> H * D / 2]`, named as in the authors' code.
        phi_conv1d: c, `[H * D / 2, 1, K]`; its last number is the present token's.

    Raises:
        ValueError: an argument out of its range; in `terms`, no states, or irregular coordinates of queries that are
            not the keys.

    Examples:
        >>> rotary, x = relpos.SelectiveRoPE(num_heads=2, head_dim=8, embed_dim=16), torch.randn(1, 10, 16)
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Sequence(10), states=x).shape
        torch.Size([1, 2, 10, 8])
    """

    growth = (AS_IS,)
    _silent_at_zero = True
    saved_settings = ("num_heads", "base", "layout")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int,
        *,
        rank: int = 32,
        conv_size: int = 4,
        base: float = 500_000.0,
        layout: Literal["half", "interleaved"] = "half",
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(head_dim, "head_dim", at_least=2)
        for name, value in (("embed_dim", embed_dim), ("rank", rank), ("conv_size", conv_size)):
            require_int(value, name, at_least=1)
        if embed_dim % num_heads:
            came = f"{num_heads} and {embed_dim}"
            fail("num_heads to divide embed_dim", came, "A state is normed by as many slices as there are heads.")
        require_number(base, "base", "above 0", "The published one is 500000.")
        require_layout(layout)
        require_std(init_std)
        self.num_heads, self.head_dim, self.embed_dim = num_heads, head_dim, embed_dim
        self.rank, self.conv_size, self.base, self.init_std = rank, conv_size, base, init_std
        self.layout: Literal["half", "interleaved"] = layout
        angles = num_heads * (head_dim // 2)
        self.phi_proj = nn.Sequential(nn.Linear(embed_dim, rank, bias=False), nn.Linear(rank, angles, bias=False))
        self.phi_conv1d = nn.Conv1d(angles, angles, conv_size, groups=angles, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim, site.embed_dim, init_std=site.init_std)

    @property
    def remembers(self) -> int:
        """P, one number for each pair of a head's dimensions."""
        return self.head_dim // 2

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N P"]:
        """phi of each token, head and pair, in float32 or wider."""
        slices = at_least_float32(states).unflatten(-1, (self.num_heads, -1))
        normed = slices * (slices.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
        phi = normed.flatten(2)
        for layer in self.phi_proj:
            phi = projected(phi, layer.weight)  # type: ignore[arg-type]
        turned: Tensor = phi.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return turned

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        assert remembered is not None
        steps = self._convolved(remembered[:, :, keys.prefix :], keys).double()
        pace = constant(frequencies(self.remembers, self.base), torch.float64, steps.device)
        query, key = running_angles(steps * pace, queries, keys, "SelectiveRoPE")
        return Terms(Rotation(query, key, layout=self.layout, width=self.head_dim))

    def _convolved(self, phi: Float[Tensor, "B H M P"], keys: Coordinates) -> Float[Tensor, "B H M P"]:
        """The causal convolution, which takes in a token only where it has its place before the present one."""
        weight = self.phi_conv1d.weight.to(phi.dtype).view(self.num_heads, 1, -1, self.conv_size)
        place = keys.tokens(phi.device)[..., 0] if isinstance(keys, Positions) else None
        count, reach = phi.shape[2], self.conv_size - 1
        before = F.pad(phi, (0, 0, reach, 0))
        steps = weight[..., -1] * phi
        for back in range(1, self.conv_size):
            earlier = before.narrow(2, reach - back, count)
            if place is not None:
                stood = F.pad(place, (reach, 0), value=_NOWHERE).narrow(-1, reach - back, count)
                earlier = torch.where((place - stood == back).view(-1, 1, count, 1), earlier, 0.0)
            steps = steps + weight[..., -1 - back] * earlier
        return steps


PRESETS = [
    Preset(
        name="selective_rope",
        title="Rotary (Selective RoPE)",
        build=SelectiveRoPE.from_site,
        summary="Each token is projected to a step for each pair of dimensions, forwards or backwards; pairs rotate by "
        "the sum of the steps so far. The text decides how fast positions pass; at the start hardly any do.",
        source="Movahedi et al. 2026 (Selective RoPE), as its configurations: rank 32, 4 tokens, base 500,000",
        token_axes=(1,),
        family="rotation",
    )
]
