"""A small decoder-only Transformer for text, with any position mechanism.

    tokens -> embedding * 3 sqrt(E) -> position on tokens -> causal blocks, position in attention -> norm -> head

Pre-norm blocks with RMSNorm and SwiGLU, as in Llama (Touvron et al. 2023, section 2.2), or LayerNorm and GELU. The
embedding's initial standard deviation is 1/(3 sqrt(E)), and its output is multiplied by 3 sqrt(E), as Vaswani et al.
2017 (section 3.4) multiply by sqrt(E). Tokens then have standard deviation 1, comparable to positions added to them.
With the head tied to the embedding (Press and Wolf 2017), the 3 keeps a small model's initial prediction near uniform;
sqrt(E) alone predicts the input token. Linear layers have PyTorch's initialization; residual projections scaled by
1/sqrt(2 depth) were not better (docs/log.md).

Without any position a causal model can still count the tokens it sees.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core import Coordinates, Mask, Positions, Sequence, Terms
from relpos.core.checks import (
    AS_DENSE,
    fail,
    is_dense,
    known_value,
    require_device,
    require_flag,
    require_int,
    require_number,
    shape_of,
)
from relpos.core.private import compiled_in_place
from relpos.layers import KeyValueCache
from relpos.layers.block import BlockConfig, MlpChoice
from relpos.layers.norms import HeadNormChoice, NormChoice, norm_layer
from relpos.models.attention_choice import AttentionChoice, WindowChoice, kind_of, pattern, windowed, windows_of
from relpos.models.config import LanguageConfig
from relpos.models.positions import PositionChoice, canonical, in_use
from relpos.models.sampling import require_sampling, sample
from relpos.models.transformer import Transformer
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.scope import decoding


class LanguageModel(Transformer):
    """A causal language model over a small vocabulary (bytes by default).

    `embed_dim`, `depth`, `num_heads`, `num_kv_heads`, `mlp_ratio`, `norm`, `norm_eps`, `qk_norm`, `attention`,
    `drop_rate`, `pos_drop_rate`, `proj_drop_rate`, `attn_drop_rate`, `position`, `shared_position`,
    `position_trainable`, `position_init_std` and `backend` are as in `VisionTransformer`.

    Args:
        vocab_size: number of different tokens, V.
        context: length it is built for; mechanisms that are defined at any position extrapolate beyond it.
        mlp: of the blocks, "swiglu" or "gelu".
        mlp_hidden: its hidden width; None for the width from `mlp_ratio`.
        embed_scale: factor on the embedded tokens; None for 3 sqrt(E). Llama's is 1.
        qkv_bias: whether the attention's two projections have biases.
        tie_embeddings: whether the head shares the token embedding's weights.
        window: number of tokens that a token sees in attention, itself included (a sliding window); None for all. A
            tuple is a schedule, as of positions: layer i has entry i modulo their number. Only with "full" attention.

    Raises:
        ValueError: arguments contradict each other, or the position does not apply to sequences.

    Examples:
        >>> model = relpos.LanguageModel(256, context=64, embed_dim=32, depth=2, num_heads=4, position="rotary_1d")
        >>> tokens = torch.randint(0, 256, (2, 10))
        >>> model(tokens).shape  # logits of what follows each token
        torch.Size([2, 10, 256])
        >>> model.generate(tokens, 5, temperature=0).shape
        torch.Size([2, 15])
        >>> model.grow(256, "yarn").context
        256
    """

    _causal = True

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 256,
        embed_dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        mlp_ratio: float = 4.0,
        mlp: MlpChoice = "swiglu",
        norm: NormChoice = "rmsnorm",
        qk_norm: HeadNormChoice | None = None,
        qkv_bias: bool = False,
        tie_embeddings: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        position: PositionChoice = "rotary_1d",
        shared_position: bool = False,
        position_trainable: bool = True,
        position_init_std: float = 0.02,
        backend: str = "auto",
        *,
        attention: AttentionChoice = "full",
        norm_eps: float | None = None,
        mlp_hidden: int | None = None,
        embed_scale: float | None = None,
        window: WindowChoice = None,
    ) -> None:
        window = tuple(window) if isinstance(window, list) else window
        position = canonical(position, axes=1)
        config = LanguageConfig(
            vocab_size=vocab_size,
            context=context,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            mlp_ratio=mlp_ratio,
            mlp=mlp,
            norm=norm,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            tie_embeddings=tie_embeddings,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            position=position,
            shared_position=shared_position,
            position_trainable=position_trainable,
            position_init_std=position_init_std,
            backend=backend,
            attention=attention,
            norm_eps=norm_eps,
            mlp_hidden=mlp_hidden,
            embed_scale=embed_scale,
            window=window,
        )
        block = BlockConfig(
            dim=embed_dim,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            num_kv_heads=num_kv_heads,
            mlp=mlp,
            norm=norm,
            qkv_bias=qkv_bias,
            proj_bias=qkv_bias,
            qk_norm=qk_norm,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            kind=kind_of(attention),
            backend=backend,
            norm_eps=norm_eps,
            mlp_hidden=mlp_hidden,
        )
        super().__init__(config, block)
        require_int(vocab_size, "vocab_size", at_least=1)
        require_int(context, "context", at_least=1)
        require_flag(tie_embeddings, "tie_embeddings")
        self.context, self.windows = context, windows_of(window, attention, depth)
        self.blocks = self.block_config.blocks(depth)
        self.token_embed = nn.Embedding(vocab_size, embed_dim)
        self.norm = norm_layer(norm, embed_dim, norm_eps)
        self.head = None if tie_embeddings else nn.Linear(embed_dim, vocab_size, bias=False)
        if embed_scale is not None:
            require_number(embed_scale, "embed_scale", "above 0", "Llama's is 1.")
        usual = 3 * math.sqrt(embed_dim)
        self.embed_scale = usual if embed_scale is None else embed_scale
        nn.init.normal_(self.token_embed.weight, std=1 / usual)
        self.positions = self._mechanisms(config, self.coordinates)

    @property
    def coordinates(self) -> Sequence:
        """The coordinates of the tokens of its context."""
        return Sequence(self.context)

    @property
    def cache_bytes(self) -> int:
        """Bytes of one token in a `KeyValueCache`, over all layers, in the weights' dtype."""
        return sum(block.attn.cache_bytes for block in self.blocks)  # type: ignore[union-attr,misc]

    def _embed(
        self, tokens: Int[Tensor, "B N"], cache: KeyValueCache | None, segments: Int[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B N E"], list[Terms], list[Mask | None], Coordinates]:
        """The input of the first block, the terms and the mask of each layer, and where the tokens are."""
        self._check(tokens, cache, segments)
        n, before = tokens.shape[1], 0 if cache is None else cache.length
        queries: Coordinates = Sequence(n, start=before)
        keys: Coordinates | None = None
        mask: Mask | None = Mask.causal()
        orders: tuple[Tensor, Tensor] | tuple[None, None] = None, None  # of queries and keys, where not their index
        if segments is not None:
            queries, mask = self._packed(segments), Mask.causal() & Mask.packed(segments)
            orders = (queries.values[..., 0],) * 2  # a window counts the tokens of its own document
        elif before:
            keys, order = Sequence(before + n), torch.arange(before + n, device=tokens.device)
            orders = order[before:], order
            mask = Mask.causal(*orders) if n > 1 else None  # a single token attends to all before it
        if (pairs := pattern(self.attention, Sequence(n))) is not None:
            pairs = pairs.to(tokens.device)
            mask = pairs if mask is None else pairs & mask
        masks = {window: windowed(mask, window, *orders) for window in set(self.windows)}
        x = self.token_embed(tokens) * self.embed_scale
        positions = in_use(self.positions)
        x = self.pos_drop(positions.embed(x, queries))
        return x, positions.terms(queries, keys), [masks[window] for window in self.windows], queries

    def _packed(self, segments: Int[Tensor, "B N"]) -> Positions:
        """The positions of tokens in packed documents; raises if one is longer than the context."""
        positions, high = positions_in(segments), min(segments.shape[1], self.context) - 1
        last = known_value(positions, torch.max)
        if last is not None and last > high:
            wanted = f"documents of at most {self.context} tokens, the model's context"
            fail(wanted, f"one of {last + 1}", "Cut them, or grow the model first.")
        return Positions(positions, low=0, high=high)

    def _check(self, tokens: object, cache: object, segments: object) -> None:
        words, weight = self.token_embed.num_embeddings, self.token_embed.weight
        if not _whole(tokens) or tokens.dim() != 2 or not tokens.numel():
            wanted = "integer tokens of shape [B, N], at least one"
            sparse = isinstance(tokens, Tensor) and not is_dense(tokens)
            fail(wanted, shape_of(tokens), AS_DENSE if sparse else "Encode the text first; add a batch axis.")
        require_device(tokens, "tokens", weight.device, "Move the tokens or the model with .to(device).")
        low, high = known_value(tokens, lambda x: torch.stack(x.aminmax())) or (0, 0)
        if low < 0 or high >= words:
            fail(f"tokens from 0 to {words - 1}", f"{low} to {high}", "Build the model with a larger vocab_size.")
        reached = tokens.shape[1] + (cache.length if isinstance(cache, KeyValueCache) else 0)
        far = torch.compiler.is_compiling() or reached > self.context  # comparing a symbol would add a guard
        if segments is None and far and AS_IS not in self.growth() and reached > self.context:
            rules = " or ".join(map(repr, self.growth())) or "no rule"
            remedy = f"Its position cannot extrapolate unchanged: call model.grow(length, rule) with {rules}."
            fail(f"at most {self.context} tokens, the context", str(reached), remedy)
        if cache is not None:
            depth = len(self.blocks)
            if not isinstance(cache, KeyValueCache) or len(cache.layers) != depth:
                fail(f"a KeyValueCache of depth {depth}", shape_of(cache), f"Pass cache=KeyValueCache({depth}).")
            if pattern(self.attention, Sequence(1)) is not None:
                raise NotImplementedError(
                    f"expected full causal attention with a cache; got {self.attention!r}. "
                    'Pass the whole input at once, or train a model with attention="full".'
                )
        if segments is not None:
            if cache is not None:
                fail("a cache or segments", "both", "Decode each document with its own cache.")
            if not _whole(segments) or segments.shape != tokens.shape:
                wanted = f"integer segments of shape {tuple(tokens.shape)}, as the tokens"
                fail(wanted, shape_of(segments), "Give each token the number of its document, -1 for padding.")
            require_device(segments, "segments", tokens.device, "Move them to the tokens' device.")

    def forward_features(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        cache: KeyValueCache | None = None,
        segments: Int[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N E"]:
        """Normalized tokens after the last block; arguments as in `forward`."""
        return self._features(*self._embed(tokens, cache, segments), cache)

    def forward(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        cache: KeyValueCache | None = None,
        segments: Int[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N V"]:
        """For each token, the logits of the next one.

        Args:
            tokens: of any length that the position mechanism accepts.
            cache: keys and values of earlier tokens; those of these tokens are appended. Logits equal those of a full
                pass, except for mechanisms whose terms change with the length (dynamic NTK): keys and values cached at
                a shorter length stay.
            segments: the document number of each token, to pack several documents in a row. A document has at most the
                context's length, counts positions from 0 and attends only to itself. -1 is padding.

        Raises:
            ValueError: tokens, cache or segments have a wrong type or size, or there are more tokens than positions.
            NotImplementedError: a cache with attention "local" or "sparse".
        """
        x = self.head_drop(self.forward_features(tokens, cache=cache, segments=segments))
        return F.linear(x, self.token_embed.weight if self.head is None else self.head.weight)

    def attention_maps(self, tokens: Int[Tensor, "B N"]) -> Iterator[Float[Tensor, "B H N N"]]:
        """Yield the attention weights of each layer, for pictures."""
        yield from self._maps(*self._embed(tokens, None, None))

    def grow(self, length: int, rule: str) -> LanguageModel:
        """A copy for another context. Its mechanisms are extended by `rule`, one of `growth()`."""
        require_int(length, "length", at_least=1)
        model = copy.deepcopy(self)
        model.context = length
        model._grow(model.coordinates, rule)
        model.grown = (*self.grown, {"length": length, "rule": rule})
        return model

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "B N"],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "B T"]:
        """The tokens followed by `max_new_tokens` more, generated with a cache, without dropout and gradients.

        Args:
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample only from the so many most likely tokens; None for all.
            top_p: sample only from the most likely tokens that together reach this probability; None for all.
            generator: for sampling; default PyTorch's own.
        """
        require_int(max_new_tokens, "max_new_tokens", at_least=0)
        require_sampling(temperature, top_k, top_p)
        training, compiled = self.training, compiled_in_place(self)
        self.eval()
        try:
            cache, new = KeyValueCache(len(self.blocks)), tokens
            with decoding(self):
                for _ in range(max_new_tokens):
                    logits = self(new, cache=cache)[:, -1]
                    if compiled:
                        for layer in cache.layers:
                            layer.expect_growth()
                    new = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                    tokens = torch.cat([tokens, new], dim=1)
        finally:
            self.train(training)
        return tokens


def positions_in(segments: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """For each token, the number of earlier tokens in its segment; 0 for padding."""
    ordered, order = segments.sort(dim=-1, stable=True)
    index = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    begins = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    first = torch.where(begins, index, 0).cummax(dim=-1).values
    positions = torch.empty_like(index).scatter(-1, order, index - first)
    return torch.where(segments < 0, 0, positions)


def _whole(x: object) -> TypeGuard[Tensor]:
    if not isinstance(x, Tensor) or not is_dense(x):
        return False
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
