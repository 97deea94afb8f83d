"""Tables of Swin's windows: one number per offset and head. In Swin V2 a network computes them from the offsets.

    score[h, i, j] += table[row(i - j), h]                          Swin
    score[h, i, j] += 16 * sigmoid(mlp(log of i - j))[h]            Swin V2, on queries and keys of length 1

The published tables are used unchanged as the values on the lines of a window. Windows that the shift cuts have a mask
of 0 and -100, one number per pair (added twice in Swin V2's first copies). The layer makes it once for all heads and
images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.grids import cached_lines, terms_of_table, values
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import DenseBias, Grid, LineBias, Terms


class Window(Retrofitted):
    """Common base of attention within windows."""

    border = 192
    training_border = 512

    cuts: ClassVar[int] = 1
    """How many times the mask of cut windows is added."""

    def takes_window(self, tokens: int, window: Sequence[int]) -> bool:
        """Whether relpos computes a call on windows."""
        return tokens == math.prod(window) and self.takes(tokens, tokens)

    def attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, mask: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        """Attention within windows, `[B * windows, N, E]`; the mask is `[windows, N, N]`."""
        if mask is not None:
            cut = mask if self.cuts == 1 else self.cuts * mask
            terms = terms + Terms(DenseBias(cut.repeat(q.shape[0] // cut.shape[0], 1, 1)[:, None]))
        out = self.attend(q, k, v, position=terms, scale=scale, dropout=dropout if self.training else 0.0)
        return out.transpose(1, 2).flatten(2)


class SwinAttention(Window):
    """`SwinAttention` of transformers, which uses its attention interface."""

    border = 512
    training_border = 192

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Attention within windows `[B * windows, N, E]`."""
        own: Any = self.relative_position_bias
        tokens = hidden_states.shape[1]
        if not self.takes_window(tokens, own.window_size):
            return super().forward(hidden_states, attention_mask, **kwargs)
        module: Any = self
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        terms = terms_of_table(self, own.relative_position_bias_table, own.window_size)
        out = self.attend_window(q, k, v, terms, attention_mask, module.scaling, module.attention_dropout)
        return module.o_proj(out), None


class SwinSelfAttention(Window):
    """Copies of Swin's first class in transformers. They project to queries, keys and values; another module projects
    the output."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
    ) -> Any:
        """Attention within windows `[B * windows, N, E]`."""
        module: Any = self
        tokens = hidden_states.shape[1]
        if output_attentions or not self.takes_window(tokens, module.window_size):
            return super().forward(hidden_states, attention_mask, output_attentions)
        shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (module.query, module.key, module.value)
        )
        q, k, scale = self.content(q, k)
        return (self.attend_window(q, k, v, self.terms(), attention_mask, scale, module.dropout.p),)

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys whose product, scaled, is the score."""
        return q, k, q.shape[-1] ** -0.5

    def terms(self) -> Terms:
        """The position of one window."""
        module: Any = self
        return terms_of_table(self, module.relative_position_bias_table, module.window_size)


class Swinv2SelfAttention(SwinSelfAttention):
    """`Swinv2SelfAttention` of transformers and its copies."""

    training_border = 256
    cuts = 2

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys of length 1, the learned scale of a head on the queries."""
        return *cosine(q, k, self.logit_scale), 1.0

    def terms(self) -> Terms:
        """The position of one window."""
        module: Any = self
        made = module.continuous_position_bias_mlp(module.relative_coords_table).flatten(0, -2)
        return terms_of_table(self, 16 * made.sigmoid(), module.window_size)


def cosine(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1, the queries times the learned scale of their head."""
    scale = logit_scale.clamp(max=math.log(100.0)).exp().view(-1, 1, 1)
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)


class TimmWindow(Window):
    """`WindowAttention` of timm: one projection of queries, keys and values."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Attention within windows `[B * windows, N, E]`."""
        module: Any = self
        if not self.takes_window(x.shape[1], module.window_size):
            return super().forward(x, mask)
        q, k, v = self.projected(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, scale = self.content(q, k)
        out = self.attend_window(q, k, v, self.terms(), mask, scale, module.attn_drop.p)
        return module.proj_drop(module.proj(out))

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values in one tensor."""
        projected: Tensor = self.qkv(x)
        return projected

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys whose product, scaled, is the score."""
        return q, k, self.scale

    def terms(self) -> Terms:
        """The position of one window."""
        module: Any = self
        return terms_of_table(self, module.relative_position_bias_table, module.window_size)


class TimmCosineWindow(TimmWindow):
    """timm's Swin V2."""

    training_border = 256

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values in one tensor; keys have no learned bias."""
        return projected_with_biases(self, x)

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys of length 1, the learned scale of a head on the queries."""
        return *cosine(q, k, self.logit_scale), 1.0

    def terms(self) -> Terms:
        """The position of one window."""
        module: Any = self
        made = module.cpb_mlp(module.relative_coords_table).flatten(0, -2)
        return terms_of_table(self, 16 * made.sigmoid(), module.window_size)


class TimmLogWindow(TimmCosineWindow):
    """timm's Swin V2 by Christoph Reich: a network on signed logarithms, without a sigmoid. Here it runs once per
    offset, not once per pair."""

    border = 100
    training_border = 144

    def takes_window(self, tokens: int, window: Sequence[int]) -> bool:
        """False if the network has dropout in training: the published one drops each pair independently."""
        module: Any = self
        drops = self.training and (module.meta_mlp.drop1.p > 0 or module.meta_mlp.drop2.p > 0)
        return not drops and super().takes_window(tokens, window)

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values in one tensor."""
        projected: Tensor = self.qkv(x)
        return projected

    def terms(self) -> Terms:
        """The position of one window: the network at one pair per offset."""
        module: Any = self
        pairs: Tensor = module.relative_coordinates_log
        window = Grid(*module.window_size)
        first = self.cached(
            ("pairs", window), pairs.device, lambda: _first_pairs(module.window_size, pairs), 2 * window.count
        )
        line = cached_lines(self, window, pairs.device)
        return Terms(LineBias(values(module.meta_mlp(pairs[first]).T), line))


def _first_pairs(window: tuple[int, int], pairs: Tensor) -> Tensor:
    """For each offset one pair of cells, `i * N + j`, in the order of lines."""
    axes = [torch.arange(1 - size, size, device=pairs.device) for size in window]
    down, right = torch.meshgrid(*axes, indexing="ij")
    query = down.clamp(min=0) * window[1] + right.clamp(min=0)
    key = (-down).clamp(min=0) * window[1] + (-right).clamp(min=0)
    return (query * window[0] * window[1] + key).flatten()


def projected_with_biases(module: Any, x: Tensor) -> Tensor:
    """Queries, keys and values of timm's layers that store the biases of queries and values separately."""
    if module.q_bias is None:
        out: Tensor = module.qkv(x)
        return out
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if module.qkv_bias_separate:
        separate: Tensor = module.qkv(x) + bias
        return separate
    return F.linear(x, module.qkv.weight, bias)


def _area(module: Any) -> int:
    rows, columns = module.window_size
    return int(rows * columns)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on two windows without a mask, then on two with the shift's mask."""
    tokens = _area(module)
    width = (module.query if hasattr(module, "query") else module.qkv).in_features
    x = draws.normal(draws.batch, tokens, width)
    shifted = draws.normal(draws.batch, tokens, width)
    first = module(x)
    second = module(shifted, _cut(tokens, shifted))
    return tuple(out if isinstance(out, Tensor) else out[0] for out in (first, second))


def _cut(tokens: int, like: Tensor) -> Tensor:
    """The mask of two windows; the shift cuts the second."""
    half = (torch.arange(tokens, device=like.device) >= tokens // 2).to(like.dtype)
    apart = (half[:, None] != half).to(like.dtype) * -100.0
    return torch.stack([torch.zeros_like(apart), apart])


def _run_swin(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Like `_run`, with sdpa: eager attention computes its softmax in float32."""
    module.config._attn_implementation_internal = "sdpa"  # on a copy
    rows, columns = module.relative_position_bias.window_size
    tokens = rows * columns
    x, shifted = (draws.normal(draws.batch, tokens, module.q_proj.in_features) for _ in range(2))
    return module(x)[0], module(shifted, _cut(tokens, shifted))[0]


def _transformers(architecture: str, file: str, name: str) -> str:
    return f"transformers.models.{architecture}.modeling_{file}.{name}"


_COPIES = {
    "donut": _transformers("donut", "donut_swin", "DonutSwinSelfAttention"),
    "maskformer": _transformers("maskformer", "maskformer_swin", "MaskFormerSwinSelfAttention"),
    "clap": _transformers("clap", "clap", "ClapAudioSelfAttention"),
}
_COSINE = {
    "swinv2": _transformers("swinv2", "swinv2", "Swinv2SelfAttention"),
    "swin2sr": _transformers("swin2sr", "swin2sr", "Swin2SRSelfAttention"),
}
_SWIN = _transformers("swin", "swin", "SwinAttention")
_TIMM: dict[str, tuple[type[TimmWindow], str, tuple[str, ...]]] = {
    "swin_transformer": (TimmWindow, "WindowAttention", ("forward", "_get_rel_pos_bias")),
    "swin_transformer_v2": (TimmCosineWindow, "WindowAttention", ("forward", "_make_pair_wise_relative_positions")),
    "swin_transformer_v2_cr": (
        TimmLogWindow,
        "WindowMultiHeadAttention",
        ("forward", "_relative_positional_encodings", "_make_pair_wise_relative_positions"),
    ),
}
_TABLES = ("relative_position_bias_table", "mlp.2.weight", "meta_mlp.fc2.weight")

KINDS = (
    PositionKind(
        name="window tables",
        library="transformers",
        replaced=(
            Replaced(
                "swin",
                _SWIN,
                SwinAttention,
                reads=("forward", "SwinRelativePositionBias"),
                tokens=lambda module: _area(module.relative_position_bias),
            ),
            *(
                Replaced(
                    architecture, path, SwinSelfAttention, ("forward", "create_relative_position_index"), tokens=_area
                )
                for architecture, path in _COPIES.items()
            ),
            *(
                Replaced(
                    architecture, path, Swinv2SelfAttention, ("forward", "create_coords_table_and_index"), tokens=_area
                )
                for architecture, path in _COSINE.items()
            ),
        ),
        verified=(
            Verified(_SWIN, _run_swin, tables=_TABLES),
            *(Verified(path, _run, tables=_TABLES) for path in (*_COPIES.values(), *_COSINE.values())),
        ),
        refused=(
            Refused(
                "dinat",
                _transformers("dinat", "dinat", "NeighborhoodAttention"),
                "it attends to neighbourhoods with natten's kernels, already in O(N)",
            ),
        ),
    ),
    PositionKind(
        name="window tables",
        library="timm",
        replaced=tuple(
            Replaced(file, f"timm.models.{file}.{name}", mixin, reads, tokens=_area)
            for file, (mixin, name, reads) in _TIMM.items()
        ),
        verified=tuple(
            Verified(f"timm.models.{file}.{name}", _run, tables=_TABLES) for file, (_, name, _) in _TIMM.items()
        ),
    ),
)
