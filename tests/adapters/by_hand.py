"""Models whose position was replaced, by hand in plain PyTorch: what their mechanisms say, and nothing of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relpos
from relpos import Grid, Sequence
from relpos.core import Coordinates
from relpos.core.terms import content


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Any,
    queries: Coordinates,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of `[B, H, N, D]` with the dense scores of a mechanism, `[B, N, H D]`; `allowed` broadcasts to them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    terms = relpos.Terms() if position is None else position.terms(queries, None)
    if scale is None:
        scale = next((term.value for term in terms.of(relpos.Scale)), q.shape[-1] ** -0.5)
    turned_q, turned_k = content(terms, q, k)
    scores = scale * turned_q @ turned_k.mT
    for term in terms:
        if not isinstance(term, relpos.Rotation | relpos.Scale | relpos.QueryBias):
            scores = scores + term.scores(q, k, scale, allowed)  # type: ignore[attr-defined]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -1e9)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(x: Tensor, count: int) -> Tensor:
    """`[B, N, H D]` as `[B, H, N, D]`."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def linear(x: Tensor, layer: Any) -> Tensor:
    """A linear layer's weights on tokens."""
    return F.linear(x, layer.weight, layer.bias)


def gradients(out: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the output, by parameter, of all that has one."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    found = torch.autograd.grad((out * weights).sum(), list(named.values()), allow_unused=True)
    return {name: x for name, x in zip(named, found, strict=True) if x is not None}


def require_same(model: nn.Module, own: Tensor, wanted: Tensor) -> None:
    """Outputs and gradients by name are those by hand; the mechanisms have some."""
    torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)
    first, second = gradients(own, model), gradients(wanted, model)
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-7, atol=1e-9, msg=name)


class _Mechanisms(list[Any]):
    """Those of a stack, one for each layer, or one for all."""

    def of(self, layer: int) -> Any:
        return self[layer % len(self)]


def _allowed(inputs: dict[str, Tensor], count: int, *, causal: bool) -> Tensor | None:
    """`[1 or B, 1, 1 or N, N]`, True where a pair may attend; None where all may."""
    order = torch.arange(count)
    past = (order <= order[:, None])[None, None] if causal else None
    real = inputs["attention_mask"].bool()[:, None, None] if "attention_mask" in inputs else None
    return past if real is None else real if past is None else past & real


def bert(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    ids, mechanisms = inputs["input_ids"], _Mechanisms(model.positions)
    where, allowed = Sequence(ids.shape[1]), _allowed(inputs, ids.shape[1], causal=False)
    words = model.embeddings.word_embeddings.weight[ids] + model.embeddings.token_type_embeddings.weight[0]
    x: Tensor = model.embeddings.LayerNorm(mechanisms[0].embed(words, where))
    for number, layer in enumerate(model.encoder.layer):
        attn = layer.attention.self
        q, k, v = (heads(linear(x, one), 4) for one in (attn.query, attn.key, attn.value))
        x = layer.attention.output(attention(q, k, v, mechanisms.of(number), where, allowed=allowed), x)
        x = layer.output(layer.intermediate(x), x)
    return x


def gpt2(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    ids, base, mechanisms = inputs["input_ids"], model.transformer, _Mechanisms(model.transformer.positions)
    where, allowed = Sequence(ids.shape[1]), _allowed(inputs, ids.shape[1], causal=True)
    x = mechanisms[0].embed(base.wte.weight[ids], where)
    for number, layer in enumerate(base.h):
        y = layer.ln_1(x) @ layer.attn.c_attn.weight + layer.attn.c_attn.bias
        q, k, v = (heads(one, 4) for one in y.chunk(3, -1))
        own = layer.attn.scaling
        scale = None if own == 8**-0.5 else own
        out = attention(q, k, v, mechanisms.of(number), where, allowed=allowed, scale=scale)
        x = x + out @ layer.attn.c_proj.weight + layer.attn.c_proj.bias
        x = x + layer.mlp(layer.ln_2(x))
    return linear(base.ln_f(x), model.lm_head)


def llama(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    ids, base, mechanisms = inputs["input_ids"], model.model, _Mechanisms(model.model.positions)
    where, allowed = Sequence(ids.shape[1]), _allowed(inputs, ids.shape[1], causal=True)
    x = mechanisms[0].embed(base.embed_tokens.weight[ids], where)
    for number, layer in enumerate(base.layers):
        attn, y = layer.self_attn, layer.input_layernorm(x)
        q = heads(linear(y, attn.q_proj), 4)
        k, v = (heads(linear(y, one), 2) for one in (attn.k_proj, attn.v_proj))
        x = x + linear(attention(q, k, v, mechanisms.of(number), where, allowed=allowed), attn.o_proj)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return linear(base.norm(x), model.lm_head)


def t5(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    count, encoded = model.config.num_heads, None
    keys = _allowed(inputs, 1, causal=False)
    for stack, ids in ((model.encoder, inputs["input_ids"]), (model.decoder, inputs["decoder_input_ids"])):
        where, mechanisms = Sequence(ids.shape[1]), _Mechanisms(stack.positions)
        allowed = keys if encoded is None else _allowed({}, ids.shape[1], causal=True)
        x = mechanisms[0].embed(model.shared.weight[ids], where)
        for number, block in enumerate(stack.block):
            attn, y = block.layer[0].SelfAttention, block.layer[0].layer_norm(x)
            q, k, v = (heads(linear(y, one), count) for one in (attn.q, attn.k, attn.v))
            x = x + linear(attention(q, k, v, mechanisms.of(number), where, allowed=allowed, scale=1.0), attn.o)
            if encoded is not None:
                attn, y = block.layer[1].EncDecAttention, block.layer[1].layer_norm(x)
                q = heads(linear(y, attn.q), count)
                k, v = (heads(linear(encoded, one), count) for one in (attn.k, attn.v))
                x = x + linear(attention(q, k, v, None, where, allowed=keys, scale=1.0), attn.o)
            x = block.layer[-1](x)
        encoded = stack.final_layer_norm(x)
    scale = model.config.d_model**-0.5 if model.config.tie_word_embeddings else 1.0
    out: Tensor = model.lm_head(encoded * scale)
    return out


def of_torch(
    model: Any, inputs: dict[str, Tensor], where: Coordinates | None = None, allowed: Tensor | None = None
) -> Tensor:
    """`nn.TransformerEncoder`, or layers of `nn.MultiheadAttention` alone; of seven tokens in a row, or where else."""
    where, mechanisms = where or Sequence(7), _Mechanisms(model.positions)
    x: Tensor = mechanisms[0].embed(next(iter(inputs.values())), where)

    def attended(layer: Any, y: Tensor, number: int) -> Tensor:
        q, k, v = (heads(one, 4) for one in F.linear(y, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1))
        return linear(attention(q, k, v, mechanisms.of(number), where, allowed=allowed), layer.out_proj)

    for number, layer in enumerate(model.layers):
        if isinstance(layer, nn.MultiheadAttention):
            x = x + attended(layer, x, number)
        elif layer.norm_first:
            x = x + attended(layer.self_attn, layer.norm1(x), number)
            x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
        else:
            x = layer.norm1(x + attended(layer.self_attn, x, number))
            x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return model.norm(x) if hasattr(model, "norm") else x  # type: ignore[no-any-return]


def timm_vit(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """ViT, DeiT and BEiT of timm, all of which scale what a layer adds or leave it."""
    patches = model.patch_embed.proj(inputs["x"]).flatten(2).mT
    tokens = (model.cls_token, getattr(model, "dist_token", None), getattr(model, "reg_token", None))
    prefix = [token.expand(len(patches), -1, -1) for token in tokens if token is not None]
    x = torch.cat([*prefix, patches], dim=1)
    where, mechanisms = Grid(2, 3, prefix=x.shape[1] - 6), _Mechanisms(model.positions)
    x = mechanisms[0].embed(x, where)
    for number, block in enumerate(model.blocks):
        attn, y = block.attn, block.norm1(x)
        biases = [getattr(attn, f"{one}_bias", None) for one in "qkv"]
        bias = attn.qkv.bias if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
        q, k, v = (heads(one, 4) for one in F.linear(y, attn.qkv.weight, bias).chunk(3, -1))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        first, second = getattr(block, "gamma_1", 1.0), getattr(block, "gamma_2", 1.0)
        x = x + first * linear(attention(q, k, v, mechanisms.of(number), where), attn.proj)
        x = x + second * block.mlp(block.norm2(x))
    normed: Tensor = model.norm(x)
    return normed


def hf_vit(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    patches = model.embeddings.patch_embeddings.projection(inputs["pixel_values"]).flatten(2).mT
    where, mechanisms = Grid(2, 3, prefix=1), _Mechanisms(model.positions)
    x = mechanisms[0].embed(torch.cat([model.embeddings.cls_token.expand(len(patches), -1, -1), patches], dim=1), where)
    for number, layer in enumerate(model.layers):
        attn, y = layer.attention, layer.layernorm_before(x)
        q, k, v = (heads(linear(y, one), 4) for one in (attn.q_proj, attn.k_proj, attn.v_proj))
        x = x + linear(attention(q, k, v, mechanisms.of(number), where), attn.o_proj)
        x = x + layer.mlp(layer.layernorm_after(x))
    normed: Tensor = model.layernorm(x)
    return normed


def swin(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Window by window, of 4 x 3 tokens; the second layer is shifted by (2, 1)."""
    x = model.patch_embed(inputs["x"])
    for stage, count in zip(model.layers, (2, 4), strict=True):
        x, mechanisms = stage.downsample(x), _Mechanisms(stage.positions)
        rows, columns = x.shape[1:3]
        for number, block in enumerate(stage.blocks):
            down, right = block.shift_size
            assert (down, right) == ((2, 1) if number else (0, 0))
            y, out = block.norm1(x), torch.zeros_like(x)
            for top in range(0, rows, 4):
                for left in range(0, columns, 3):
                    at_rows = (torch.arange(top, top + 4) + down) % rows
                    at_columns = (torch.arange(left, left + 3) + right) % columns
                    tokens = y[:, at_rows][:, :, at_columns].flatten(1, 2)
                    q, k, v = (heads(one, count) for one in linear(tokens, block.attn.qkv).chunk(3, -1))
                    wraps = (at_rows < down)[:, None] * 2 + (at_columns < right)
                    together = wraps.flatten() == wraps.flatten()[:, None]
                    made = attention(q, k, v, mechanisms.of(number), Grid(4, 3), allowed=together)
                    out[:, at_rows[:, None], at_columns] = linear(made, block.attn.proj).unflatten(1, (4, 3))
            x = x + out
            x = x + block.mlp(block.norm2(x))
    normed: Tensor = model.norm(x)
    return normed
