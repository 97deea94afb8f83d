"""Attention modules: on queries, keys and values, and multi-head attention on tokens.

`kind` is how the heads of a layer attend:

    softmax     `relpos.attention`: any position, any mask, any engine
    linear      `relpos.linear_attention` with elu + 1: a rotation or no position, causal or not
    flash       `relpos.flash_attention`: at most a line bias and a rotation, causal or not
"""

from __future__ import annotations

import copy
from typing import Any, Literal, NoReturn, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, DenseBias, LineBias, Mask, MaskLike, Rotation, Sequence, Term, Terms, content
from relpos.core.checks import (
    NO_OTHER,
    fail,
    require_choice,
    require_flag,
    require_floating,
    require_int,
    require_probability,
    shape_of,
    without_autocast,
)
from relpos.engines import attention, attention_weights, flash_attention, linear_attention, require_backend
from relpos.layers.cache import LayerCache
from relpos.layers.context import SharedSequence
from relpos.layers.norms import HeadNormChoice
from relpos.layers.projection import SelfAttention
from relpos.position import Mechanism
from relpos.position.base.device import settle
from relpos.position.base.states import remembers, terms_of
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, parts_of

AttentionKind = Literal["softmax", "linear", "flash"]


class ScaledDotProductAttention(nn.Module):
    """`softmax(q k^T / sqrt(D) + bias) v` (Vaswani et al. 2017) as a module without parameters.

    Args:
        dropout: probability that an attention weight is dropped in training.
        scale: True for 1/sqrt(D), False for 1.
        backend: an engine's name, or "auto".

    Raises:
        ValueError: an invalid probability or an unknown backend; in use, as in `attention`.

    Examples:
        >>> bias = relpos.RelativePositionBias(num_heads=2, seq_len=5)
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.ScaledDotProductAttention(dropout=0.1).eval()(q, k, v, bias()).shape  # a dense [H, N, M]
        torch.Size([1, 2, 5, 8])
    """

    def __init__(self, dropout: float = 0.0, scale: bool = True, backend: str = "auto") -> None:
        super().__init__()
        require_probability(dropout, "dropout")
        require_backend(backend)
        require_flag(scale, "scale", "For another factor pass position=Scale(factor).")
        self.dropout, self.scale, self.backend = dropout, scale, backend

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M V"],
        relative_position_bias: Float[Tensor, "H N M"] | None = None,
        *,
        position: Terms | Term | None = None,
        mask: MaskLike | None = None,
    ) -> Float[Tensor, "B H N V"]:
        """Attention of q to k and v.

        Args:
            relative_position_bias: a dense `[H, N, M]` bias, as `RelativePositionBias()` returns it.
            position: terms, instead of a dense bias.
            mask: which pairs may attend, as `relpos.attention` takes it.
        """
        if relative_position_bias is not None:
            if position is not None:
                fail("relative_position_bias or position", "both", "Add them: position = terms + DenseBias(bias).")
            require_floating(relative_position_bias, "relative_position_bias", dims=3)
            position = DenseBias(relative_position_bias[None])
        scale, dropout = None if self.scale else 1.0, self.dropout if self.training else 0.0
        return attention(q, k, v, position=position, mask=mask, scale=scale, dropout=dropout, backend=self.backend)


class MultiHeadAttention(SelfAttention):
    """Multi-head self-attention (Vaswani et al. 2017) with one QKV projection. Arguments are named as in timm.

    Args:
        dim: width of a token, E; a multiple of `num_heads`.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, G; a divisor of H. None for H; 1 is multi-query attention.
        qkv_bias: whether the QKV projection has a bias.
        proj_bias: whether the output projection has one.
        qk_norm: of the queries and keys of each head, before any rotation: "rmsnorm", "layernorm", "cosine" or None.
            "cosine" is Swin V2's: `CosineScale`, and a bias of queries and values but not of keys.
        norm_eps: of `qk_norm`; None for 1e-5 of "layernorm" and 1e-6 of "rmsnorm".
        attn_drop: dropout probability of attention weights.
        proj_drop: dropout probability of the output.
        position: the layer's own mechanism; `forward` also takes terms, which are added.
        kind: "softmax"; or "linear" or "flash", which support fewer positions and masks.
        backend: an engine's name, or "auto".

    Raises:
        ValueError: the heads do not divide the width, the mechanism acts on tokens only, or an argument is invalid.

    Examples:
        >>> bias = relpos.RelativePositionBias(num_heads=4, window_size=(7, 7))
        >>> layer = relpos.MultiHeadAttention(64, num_heads=4, position=bias)
        >>> layer(torch.randn(2, 49, 64), coordinates=relpos.Grid(7, 7)).shape
        torch.Size([2, 49, 64])
        >>> rotary = relpos.MultiHeadAttention(64, num_heads=4, position=relpos.RotaryEmbedding(16))
        >>> rotary(torch.randn(2, 10, 64), mask=relpos.Mask.causal()).shape  # without coordinates, a sequence
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_kv_heads: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: HeadNormChoice | None = None,
        norm_eps: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        position: Mechanism | None = None,
        kind: AttentionKind = "softmax",
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim, num_heads, num_kv_heads, qkv_bias=qkv_bias, proj_bias=proj_bias, qk_norm=qk_norm, norm_eps=norm_eps,
            position=position, width_name="dim",
        )  # fmt: skip
        require_choice(kind, "kind", get_args(AttentionKind), NO_OTHER)
        if self.scale is not None and kind != "softmax":
            fail('kind="softmax" with qk_norm="cosine"', repr(kind), "The other kinds have their own scale.")
        require_probability(attn_drop, "attn_drop")
        require_probability(proj_drop, "proj_drop")
        require_backend(backend)
        for part in [] if position is None else parts_of(position):
            if acts_on_tokens(part) and not acts_in_attention(part):
                remedy = "Call its embed() on the tokens before the first layer, and leave it out here."
                fail("a mechanism that acts in attention", f"{type(part).__name__}, which acts on tokens", remedy)
        self.kind: AttentionKind = kind
        self.attn_drop, self.backend = attn_drop, backend
        self.proj_drop = nn.Dropout(proj_drop)

    shared_sequence: SharedSequence | None = None
    """The sequence of which the tokens are a share; `relpos.parallel.context_parallel` sets it."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that one token takes in a cache: its keys and values in the dtype of the weights, and in float32 or
        wider what it contributes to a mechanism that is made from hidden states."""
        size = self.qkv.weight.element_size()
        return 2 * self.num_kv_heads * self.head_dim * size + self.num_heads * remembers(self.position) * max(4, size)

    def forward(
        self,
        x: Float[Tensor, "B N E"],
        *,
        position: Terms | Term | None = None,
        coordinates: Coordinates | None = None,
        mask: MaskLike | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B N E"]:
        """Self-attention of tokens.

        Args:
            position: terms to add to those of the layer's own mechanism, e.g. of a table that layers share.
            coordinates: the coordinates of the tokens, for the layer's own mechanism; default a sequence.
            mask: which pairs may attend, as `relpos.attention` takes it.
            cache: keys and values of earlier tokens, to which those of these tokens are appended. Terms and mask are
                then between these tokens and all tokens of the cache.

        Raises:
            ValueError: tokens, terms, mask or cache do not fit the layer or each other.
            NotImplementedError: the layer's kind or engine does not support a term or the mask.
        """
        q, k, v = self._heads(x)
        if self.shared_sequence is not None:
            if cache is not None or self.kind != "softmax":
                came = "a cache" if cache is not None else f"kind={self.kind!r}"
                fail("softmax attention of all tokens at once over several ranks", came, "Use one process for it.")
            shared = self._attend_shared(self.shared_sequence, x, (q, k, v), position, coordinates, mask)
            return self.proj_drop(self._joined(shared))  # type: ignore[no-any-return]
        before = 0 if cache is None else cache.length
        new = None
        if cache is not None and self.position is not None and remembers(self.position):
            with without_autocast(x.device):  # as its terms are made
                new = self.position.remembered(x)  # type: ignore[operator]  # of one that remembers
        kept = None if cache is None or new is None else cache.all_remembered(new)
        terms = self._terms(x, before + q.shape[2], position, coordinates, kept)
        if cache is not None:
            k, v = cache.extend(k, v, new)
        tokens: Tensor = self.proj_drop(self._joined(self._attend(q, k, v, terms, mask)))
        return tokens

    def _attend_shared(
        self,
        context: SharedSequence,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        terms: Terms | Term | None,
        coordinates: Coordinates | None,
        mask: MaskLike | None,
    ) -> Tensor:
        """Attention where x is a share of the tokens, and the rest is of all."""
        if self.position is not None:
            settle(self.position, self.qkv.weight.device)
        if self.attn_drop and self.training:
            remedy = "Each would draw its own: build the model with attn_drop=0.0."
            fail("no dropout of attention weights over several ranks", f"attn_drop={self.attn_drop}", remedy)
        return context.attend(
            heads, position=self.position, terms=terms, coordinates=coordinates, mask=mask, scale=self.scale, states=x
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, position: Terms | Term | None, mask: MaskLike | None = None
    ) -> Tensor:
        dropout = self.attn_drop if self.training else 0.0
        if self.kind == "softmax":
            return attention(
                q, k, v, position=position, mask=mask, scale=self.scale, dropout=dropout, backend=self.backend
            )
        if dropout:
            self._lacks("no dropout of attention weights", f"{dropout:g}")
        if mask is not None and not Mask.of(mask).is_plain_causal:
            self._lacks("a causal mask or none", "another mask")
        causal = mask is not None
        if self.kind == "linear":
            return linear_attention(q, k, v, causal=causal, position=position)
        terms = Terms() if position is None else Terms() + position
        biases, rotations = terms.of(LineBias), [term for term in terms.of(Rotation) if term.widens == 1]
        if len(biases) > 1 or len(biases) + len(rotations) < len(terms):
            self._lacks("a line bias, a rotation or both as position", ", ".join(type(term).__name__ for term in terms))
        for rotation in rotations:
            rotation.check(q, k, v)
            if rotation.values:
                self._lacks("a rotation of queries and keys alone", "a Rotation of values")
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        q, k = content(Terms(*rotations), q, k)
        return flash_attention(q, k, v, bias=biases[0] if biases else None, causal=causal)

    def _lacks(self, expected: str, came: str) -> NoReturn:
        remedy = "Leave it out, or build and train the layer with kind='softmax'."
        raise NotImplementedError(f"expected {expected}; got {came}, which kind={self.kind!r} lacks. {remedy}")

    def _terms(
        self,
        x: Tensor,
        m: int,
        position: Terms | Term | None,
        coordinates: Coordinates | None,
        remembered: Tensor | None = None,
    ) -> Terms | Term | None:
        """The terms between tokens and m keys, the last of which are the tokens'. `remembered`: of all keys."""
        n = x.shape[1]
        if self.position is None:
            if coordinates is not None:
                fail("coordinates only in a layer with its own mechanism", "no mechanism", "Pass position=terms.")
            return position
        if position is not None and not isinstance(position, Term | Terms):
            fail(
                "position= to be terms in a layer with its own mechanism", shape_of(position), "Call its terms() first."
            )
        if coordinates is not None and m > n:
            fail("no coordinates with a cache that holds tokens", repr(coordinates), "A cache is a plain sequence.")
        queries = Sequence(n, start=m - n) if coordinates is None else coordinates
        settle(self.position, self.qkv.weight.device)
        own = terms_of(self.position, queries, Sequence(m) if m > n else None, x, remembered)
        return own if position is None else own + position

    def grouped(self, num_kv_heads: int) -> MultiHeadAttention:
        """A copy with fewer key/value heads, each the mean of a group of heads (Ainslie et al. 2023, section 2.1).

        The copy computes the same if the heads of each group are equal; otherwise it needs further training.

        Raises:
            ValueError: `num_kv_heads` does not divide that of the layer.
        """
        require_int(num_kv_heads, "num_kv_heads", at_least=1)
        if self.num_kv_heads % num_kv_heads:
            fail("num_kv_heads to divide the layer's", f"{num_kv_heads} and {self.num_kv_heads}", "Choose a divisor.")
        layer = copy.deepcopy(self)
        layer.num_kv_heads = num_kv_heads
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]

        def mean(x: Tensor) -> nn.Parameter:
            q, k, v = x.detach().unflatten(0, (-1, self.head_dim)).split(counts)
            k, v = (heads.unflatten(0, (num_kv_heads, -1)).mean(dim=1) for heads in (k, v))
            return nn.Parameter(torch.cat([q, k, v]).flatten(0, 1), requires_grad=x.requires_grad)

        layer.qkv.weight = mean(self.qkv.weight)
        layer.qkv.bias = None if self.qkv.bias is None else mean(self.qkv.bias)
        layer.qkv.out_features = layer.qkv.weight.shape[0]
        if self.v_bias is not None:
            heads = self.v_bias.detach().unflatten(0, (num_kv_heads, -1, self.head_dim)).mean(dim=1)
            layer.v_bias = nn.Parameter(heads.flatten(), requires_grad=self.v_bias.requires_grad)
        return layer

    def weights(
        self,
        x: Float[Tensor, "B N E"],
        *,
        position: Terms | Term | None = None,
        coordinates: Coordinates | None = None,
        mask: MaskLike | None = None,
    ) -> Float[Tensor, "B H N N"]:
        """The attention weights; arguments as in `forward`.

        Raises:
            NotImplementedError: the kind is "linear", which has no softmax.
        """
        if self.kind == "linear":
            raise NotImplementedError("expected softmax attention to draw; got kind='linear'.")
        q, k, _ = self._heads(x)
        terms = self._terms(x, k.shape[2], position, coordinates)
        return attention_weights(q, k, position=terms, mask=mask, scale=self.scale)


class MultiQueryAttention(MultiHeadAttention):
    """Multi-head attention with one head of keys and values, which makes a cache H times smaller (Shazeer 2019).

    Args:
        d_model: width of a token, E; a multiple of `num_heads`.
        num_heads: query heads, H.
        options: other arguments of `MultiHeadAttention`, except `num_kv_heads`.

    Raises:
        ValueError: as `MultiHeadAttention`.

    Examples:
        >>> layer = relpos.MultiQueryAttention(64, 8)
        >>> layer.cache_bytes, relpos.MultiHeadAttention(64, 8).cache_bytes  # of one token
        (64, 512)
        >>> layer(torch.randn(2, 10, 64), mask=relpos.Mask.causal()).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, d_model: int, num_heads: int, **options: Any) -> None:
        super().__init__(d_model, num_heads, num_kv_heads=1, **options)
