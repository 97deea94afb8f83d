"""Wrong calls of layers, models, optimizers, and of what changes models."""

from typing import Any

import torch
from ingredients import META, TABLE, WINDOW, Row, vit, x
from torch import nn, ones, zeros

from relpos import (
    ALiBiPositionalEmbedding,
    GatedMlp,
    GroupNorm,
    KeyValueCache,
    LanguageModel,
    LearnedPositionEmbedding,
    LinearAttention,
    LineBias,
    Lion,
    LocalAttention,
    Mask,
    Mlp,
    MultiHeadAttention,
    MultiQueryAttention,
    PatchEmbedding,
    RotaryEmbedding,
    RotaryPositionalEmbedding,
    Scale,
    ScaledDotProductAttention,
    Sequence,
    Sophia,
    SwinTransformer,
    T5Bias,
    TransformerBlock,
    compare,
    count_parameters,
    flash_attention,
    linear_attention,
    load_weights,
    optim,
    replace_position,
    resize_position,
    restore,
    retrofit,
    sampled_loss,
)
from relpos.layers import LayerCache

QKV = torch.randn(1, 2, 5, 4)
tokens = torch.randn(1, 5, 8)
weight = nn.Parameter(ones(3))
TOKENS = zeros(2, 6).long()


def linear(**more: Any) -> Any:
    """Linear attention of five tokens."""
    return linear_attention(QKV, QKV, QKV, **more)


def lm(**changes: Any) -> LanguageModel:
    """A small language model with some of its arguments replaced."""
    return LanguageModel(**{"vocab_size": 5, "context": 6, "embed_dim": 16, "depth": 2, "num_heads": 2, **changes})


def swin(**changes: Any) -> SwinTransformer:
    """A small Swin Transformer with some of its arguments replaced."""
    small = {"img_size": 8, "patch_size": 2, "embed_dim": 8, "depths": (1,), "num_heads": (2,), "window_size": 2}
    return SwinTransformer(**{**small, **changes})


def used(width: int = 32) -> LayerCache:
    """A layer's cache that holds two tokens of a batch of two."""
    cache = LayerCache()
    MultiHeadAttention(width, 4, position=TABLE)(zeros(2, 2, width), cache=cache)
    return cache


def remembering() -> LayerCache:
    """One that holds six tokens of a batch of two, and what each contributes."""
    cache = LayerCache()
    cache.extend(x(), x(), zeros(2, 4, 6, 1))
    return cache


# fmt: off
CASES: dict[str, list[Row]] = {
    "ALiBiPositionalEmbedding": [
        (lambda: ALiBiPositionalEmbedding(2)(QKV),
         "scores of shape [B, 2, N, N]; got a tensor of shape (1, 2, 5, 4).... For a cache, pass relpos.ALiBi to ..."),
        (lambda: ALiBiPositionalEmbedding(2, 4)(zeros(1, 2, 5, 5)),
         "at most max_seq_len=4 tokens; got 5. Build it with a larger one."),
    ],
    "compare": [
        (lambda: compare(data=3),
         "data as a folder of images, a file of text, digits, text or datasets; got int 3. Pass one of them."),
        (lambda: compare("timm:vit_tiny_patch16"),
         "the name of a model of timm; got 'vit_tiny_patch16'. Did you mean vit_tiny_patch16_384, ..."),
        (lambda: compare(quick=1), "quick to be True or False; got int 1. Pass one of them."),
        (lambda: compare(rotate="no"), "rotate to be True or False; got str 'no'. Pass one of them."),
        (lambda: compare(seeds=0), "seeds to be an integer of at least 1; got int 0. Pass a larger one."),
    ],
    "count_parameters": [
        (lambda: count_parameters("x"), "a module to count; got str 'x'. Build the model first."),
    ],
    "flash_attention": [
        (lambda: flash_attention(QKV, QKV, QKV, bias=T5Bias(2).terms(Sequence(9)).of(LineBias)[0]),
         "lines of LineBias for 5 queries; got 9. Build the terms from the coordinates of these tokens, prefix ..."),
        (lambda: flash_attention(QKV, QKV, QKV, bias=ones(2, 5, 5)),
         "bias to be a LineBias; got a tensor of shape (2, 5, 5) and dtype float32. An OffsetBias gives one: ..."),
    ],
    "GatedMlp": [
        (lambda: GatedMlp(8, 8)(zeros(2, 6, 9)),
         "floating-point tokens of shape [B, N, 8]; got a tensor of shape (2, 6, 9).... Layout is [batch, ..."),
    ],
    "GroupNorm": [
        (lambda: GroupNorm(6, 4), "d_model to be a multiple of num_groups; got 6 and 4. Change one of them."),
        (lambda: GroupNorm(6, 2)(tokens),
         "floating-point tokens of shape [B, N, 6]; got a tensor of shape (1, 5, 8).... Layout is [batch, ..."),
    ],
    "KeyValueCache": [
        (lambda: used().extend(x(3, tokens=1), x(3, tokens=1)),
         "keys like those in the cache, ...; got a tensor of shape (3, 4, 1, 8).... Start a new ..."),
        (lambda: used().extend(x(), x(width=4)),
         "values like those in the cache, ...; got a tensor of shape (2, 4, 6, 4).... Start a new ..."),
        (lambda: used().extend(x(dtype=torch.bfloat16), x(dtype=torch.bfloat16)),
         "keys like those in the cache, ...; got ...dtype bfloat16.... Start a new KeyValueCache for ..."),
        (lambda: used().extend(x(device=META), x(device=META)),
         "keys like those in the cache, ...; got ...on meta. Start a new KeyValueCache for another batch."),
        (lambda: used().extend(x(tokens=1), x(tokens=1), zeros(2, 4, 1, 1)),
         "remembered= like that in the cache, nothing; got ...(2, 4, 1, 1)... Start a new ..."),
        (lambda: remembering().extend(x(tokens=1), x(tokens=1)),
         "remembered= with the keys, as before; got none. Pass remembered=, or start a new cache."),
        (lambda: remembering().extend(x(tokens=1), x(tokens=1), zeros(2, 4, 1, 2)),
         "remembered= like that in the cache, ...(2, 4, 6, 1)...; got ...(2, 4, 1, 2)... Start ..."),
        (lambda: KeyValueCache(1).crop(1), "length of at most 0, the tokens of the cache; got 1. It cannot grow so."),
        (lambda: KeyValueCache(1).crop(-1), "length to be an integer of at least 0; got int -1. ..."),
        (lambda: KeyValueCache(1).reorder(zeros(2)), "rows as integers; got ...(2,)... Give the numbers of ..."),
        (lambda: LayerCache().extend(x()[0], x()[0]),
         "keys for the cache to be a tensor with 4 dimensions; got ...(4, 6, 8).... Reshape keys for the cache ..."),
        (lambda: LayerCache().extend(x(), x(tokens=5)),
         "as many keys as values for the cache; got 6 and 5. Both come from the same tokens."),
    ],
    "LanguageModel": [
        (lambda: lm(embed_dim="16"), "dim to be an integer of at least 1; got str '16'. Pass dim as a Python int."),
        (lambda: lm(num_heads=3), "dim to be a multiple of num_heads; got 16 and 3. Change one of them."),
        (lambda: lm(num_heads=4, num_kv_heads=3),
         "num_heads to be a multiple of num_kv_heads; got 4 and 3. Change one of them."),
        (lambda: lm(mlp="SwiGLU"),
         "mlp to be one of 'gelu', 'swiglu'; got str 'SwiGLU'. No other is supported: trained weights would ..."),
        (lambda: lm(position="rotary1d"),
         "the name of a position; got 'rotary1d'. Did you mean 'rotary_1d'? Such as ..."),
        (lambda: lm(position="relative_2d"),
         "a grid of rows and columns for a 2-D bias; got Sequence(length=6.... Use relative_1d on a sequence."),
        (lambda: lm()(zeros(2, 6)),
         "integer tokens of shape [B, N], at least one; got a tensor of shape (2, 6).... Encode the text first; ..."),
        (lambda: lm()(TOKENS[0]),
         "integer tokens of shape [B, N], at least one; got ...(6,)... int64. Encode the text first; add a batch ..."),
        (lambda: lm()(TOKENS[:, :0]),
         "integer tokens of shape [B, N], at least one; got ...(2, 0)... int64. Encode the text first; add a ..."),
        (lambda: lm()(TOKENS + 5), "tokens from 0 to 4; got 5 to 5. Build the model with a larger vocab_size."),
        (lambda: lm()(TOKENS.to(META)),
         "tokens on cpu; got meta. Move the tokens or the model with .to(device). Tensors on meta have no ..."),
        (lambda: lm(position="learned")(zeros(2, 7).long()),
         "at most 6 tokens, the context; got 7. Its position cannot extrapolate unchanged: call ..."),
        (lambda: lm()(TOKENS, cache=True), "a KeyValueCache of depth 2; got bool True. Pass cache=KeyValueCache(2)."),
        (lambda: lm()(TOKENS, cache=KeyValueCache(3)),
         "a KeyValueCache of depth 2; got KeyValueCache(3), length 0. Pass cache=KeyValueCache(2)."),
        (lambda: lm()(TOKENS, cache=KeyValueCache(2), segments=TOKENS),
         "a cache or segments; got both. Decode each document with its own cache."),
        (lambda: lm()(TOKENS, segments=TOKENS[0]),
         "integer segments of shape (2, 6), as the tokens; got ...(6,)... int64. Give each token the number of ..."),
        (lambda: lm()(TOKENS, segments=TOKENS.bool()),
         "integer segments of shape (2, 6), as the tokens; got ...(2, 6)... bool. Give each token the number of ..."),
        (lambda: lm()(TOKENS, segments=TOKENS.to(META)),
         "segments on cpu; got meta. Move them to the tokens' device. Tensors on meta have no numbers, and ..."),
        (lambda: lm().generate(TOKENS, 1, top_p=1.5),
         "top_p to be at most 1; got float 1.5. It is a probability, such as 0.9; leave it out to draw from all."),
        (lambda: lm(position="learned").grow(9, "clipped"),
         "a growth rule of LearnedPositionEmbedding (it has interpolated...; got 'clipped'. A mechanism without ..."),
    ],
    "linear_attention": [
        (lambda: linear(decay=ones(2)),
         "decay only in a causal call; got causal=False. A sum over all tokens has no direction to decay in."),
        (lambda: linear_attention(QKV, QKV[..., :3], QKV),
         "q [B, H, N, D]...; got ...(1, 2, 5, 3).... ...the same width..."),
        (lambda: linear_attention(QKV[:, :1], QKV, QKV),
         "query heads to be a multiple of key heads; got 1 and 2. Change one of them."),
        (lambda: linear(causal=True, decay=0.9),
         "a tensor with one decay per query head, [2], in floating point; got float 0.9. Values are above 0, at ..."),
        (lambda: linear(position=RotaryEmbedding(4).terms(Sequence(6))),
         "Rotation query angles of shape [1, 1 or 2, 5, 2]; got ...(1, 1, 6, 2)... float64. Build it for the same ..."),
    ],
    "LinearAttention": [
        (lambda: LinearAttention(9, 2), "d_model to be a multiple of num_heads; got 9 and 2. Change one of them."),
        (lambda: LinearAttention(6, 2)(tokens),
         "floating-point tokens of shape [B, N, 6]; got a tensor of shape (1, 5, 8).... Layout is [batch, ..."),
    ],
    "Lion": [
        (lambda: Lion([weight], betas=(0.9, 1.0)),
         "two betas, at least 0 and below 1; got (0.9, 1.0). Pass betas=(beta1, beta2)."),
        (lambda: Lion([weight], lr=-1.0), "lr to be a number of at least 0; got float -1.0. Pass a learning rate."),
    ],
    "load_weights": [
        (lambda: load_weights(3, {}), "a model to load weights into; got int 3. Build it first."),
        (lambda: load_weights(lm(), 3),
         "a state dict, a file or a folder of weights; got int 3. Pass for example model.state_dict()."),
        (lambda: load_weights(lm(), {}),
         "a state dict of names and tensors; got dict {}. Pass model.state_dict(), a file or a folder."),
        (lambda: load_weights(lm(), {"token_embed.weight": zeros(5, 16)}),
         "weights that fit this LanguageModel; got relpos, which lacks blocks.0.norm1.weight.... Build the model ..."),
    ],
    "LocalAttention": [
        (lambda: LocalAttention(8, 2, 4),
         "an odd window_size, half of it on each side; got 4. Add one, or pass causal=True."),
    ],
    "Mlp": [
        (lambda: Mlp(8, 8)(zeros(2, 6, 9)),
         "floating-point tokens of shape [B, N, 8]; got a tensor of shape (2, 6, 9).... Layout is [batch, ..."),
        (lambda: Mlp(8, 8).double()(zeros(1, 1, 8)),
         "tokens in float64, as the layer's weights are; got ...(1, 1, 8).... Convert one of them with ..."),
    ],
    "MultiHeadAttention": [
        (lambda: MultiHeadAttention(30, 4), "dim to be a multiple of num_heads; got 30 and 4. Change one of them."),
        (lambda: MultiHeadAttention(32, 4, num_kv_heads=3),
         "num_heads to be a multiple of num_kv_heads; got 4 and 3. Change one of them."),
        (lambda: MultiHeadAttention(32, 4, position="relative_2d"),
         "position to be a mechanism; got str 'relative_2d'. Build it first, e.g. RotaryEmbedding(head_dim)."),
        (lambda: MultiHeadAttention(32, 4, position=LearnedPositionEmbedding(32, seq_len=6)),
         "a mechanism that acts in attention; got LearnedPositionEmbedding, which acts on tokens. Call its ..."),
        (lambda: MultiHeadAttention(32, 4, position=LearnedPositionEmbedding(32, seq_len=6) + TABLE),
         "a mechanism that acts in attention; got LearnedPositionEmbedding, which acts on tokens. Call its ..."),
        (lambda: MultiHeadAttention(32, 4)(zeros(6, 32)),
         "floating-point tokens of shape [B, N, 32]; got a tensor of shape (6, 32).... Layout is [batch, tokens, ..."),
        (lambda: MultiHeadAttention(32, 4)(zeros(2, 6, 31)),
         "floating-point tokens of shape [B, N, 32]; got ...(2, 6, 31).... Layout is [batch, tokens, width]."),
        (lambda: MultiHeadAttention(32, 4)(zeros(2, 6, 32).long()),
         "floating-point tokens of shape [B, N, 32]; got ...(2, 6, 32)... int64. Layout is [batch, tokens, width]."),
        (lambda: MultiHeadAttention(32, 4).bfloat16()(zeros(2, 6, 32)),
         "tokens in bfloat16, as the layer's weights are; got ...(2, 6, 32).... Convert one of them with ..."),
        (lambda: MultiHeadAttention(32, 4)(zeros(2, 6, 32), coordinates=Sequence(6)),
         "coordinates only in a layer with its own mechanism; got no mechanism. Pass position=terms."),
        (lambda: MultiHeadAttention(32, 4, position=TABLE)(zeros(2, 6, 32), coordinates=Sequence(5)),
         "lines of LineBias for 6 queries; got 5. Build the terms from the coordinates of these tokens, prefix ..."),
        (lambda: MultiHeadAttention(32, 2, position=TABLE)(zeros(2, 6, 32)),
         "LineBias values for 2 query heads, or for 1 shared by all; got ...(4, 11).... Build the mechanism ..."),
        (lambda: MultiHeadAttention(32, 4)(zeros(2, 6, 32), position=TABLE),
         "queries= with a mechanism; got none. Give the coordinates of the tokens, e.g. queries=Sequence(n) or ..."),
        (lambda: MultiHeadAttention(32, 4, position=WINDOW)(zeros(2, 6, 32)),
         "coordinates with 2 axes; got Sequence(length=6, start=0, prefix=0). Use a Grid(rows, columns)."),
        (lambda: MultiHeadAttention(32, 4, position=TABLE)(zeros(2, 1, 32), coordinates=Sequence(1), cache=used()),
         "no coordinates with a cache that holds tokens; got Sequence(length=1.... A cache is a plain sequence."),
        (lambda: MultiHeadAttention(32, 4, position=TABLE)(zeros(2, 2, 32), cache=used(), mask=Mask.causal()),
         "query_order and key_order for a causal or windowed mask of 2 queries and 4 keys; got no order. Give ..."),
        (lambda: MultiHeadAttention(32, 4, qk_norm="cosine", kind="linear"),
         'kind="softmax" with qk_norm="cosine"; got \'linear\'. The other kinds have their own scale.'),
        (lambda: MultiHeadAttention(32, 4, qk_norm="cosin"),
         "qk_norm to be one of 'layernorm', 'rmsnorm', 'cosine'; got str 'cosin'. No other is supported: trained ..."),
    ],
    "MultiQueryAttention": [
        (lambda: MultiQueryAttention(9, 2), "dim to be a multiple of num_heads; got 9 and 2. Change one of them."),
    ],
    "parameter_groups": [
        (lambda: optim.parameter_groups([weight], learning_rate=1.0, weight_decay=0.0),
         "a module; got list [Parameter containing: tensor([1., 1., 1.], requires_grad=True)]. Build the model first."),
    ],
    "PatchEmbedding": [
        (lambda: PatchEmbedding(8, 2, 1, 8).bfloat16()(zeros(1, 1, 8, 8)),
         "images in bfloat16, as the layer's weights are; got ...(1, 1, 8, 8).... Convert one of them with ..."),
        (lambda: PatchEmbedding(15, 2, 1, 8),
         "an image size divisible by the patch size (2, 2); got (15, 15). Pad or crop the image, or choose ..."),
        (lambda: PatchEmbedding(16, 0, 1, 8),
         "patch_size to be an integer of at least 1; got int 0. Pass a larger one."),
        (lambda: PatchEmbedding((16, 16, 16), 2, 1, 8),
         "img_size to be one integer or (rows, columns); got tuple (16, 16, 16). Pass img_size=16 or ..."),
        (lambda: PatchEmbedding(16, 2, 1, 8)(zeros(2, 3, 16, 16)),
         "floating-point images of shape [B, 1, rows, columns]; got ...(2, 3, 16, 16)... Check in_chans, and ..."),
        (lambda: PatchEmbedding(16, 2, 1, 8)(zeros(16, 16)),
         "floating-point images of shape [B, 1, rows, columns]; got ...(16, 16).... Check in_chans, and convert ..."),
        (lambda: PatchEmbedding(16, 2, 1, 8)(zeros(2, 1, 15, 16)),
         "an image size divisible by the patch size (2, 2); got (15, 16). Pad or crop the image, or choose ..."),
        (lambda: PatchEmbedding(16, 2, 1, 8)(zeros(2, 1, 16, 16, dtype=torch.uint8)),
         "floating-point images of shape [B, 1, rows, columns]; got ...(2, 1, 16, 16) and dtype uint8. Check ..."),
    ],
    "resize_position": [
        (lambda: resize_position("t5", 8), "a model, an nn.Module; got str 't5'. Pass the model itself."),
        (lambda: resize_position(torch.nn.Linear(2, 2), 0),
         "size to be an integer of at least 1; got int 0. Pass a larger one."),
        (lambda: resize_position(torch.nn.Linear(2, 2), 8),
         "a model with mechanisms of relpos; got Linear, which has none. Call relpos.replace_position first."),
    ],
    "replace_position": [
        (lambda: replace_position("t5", "t5"), "a model, an nn.Module; got str 't5'. Pass the model itself."),
        (lambda: replace_position(torch.nn.MultiheadAttention(8, 2), "relative_2d", coordinates=Sequence(5)),
         "...which have 1; got 'relative_2d', which is for 2 or 3. Choose another: relpos list positions."),
    ],
    "restore": [
        (lambda: restore("t5"), "a model, an nn.Module; got str 't5'. Pass the model itself."),
    ],
    "retrofit": [
        (lambda: retrofit("t5"), "a model, an nn.Module; got str 't5'. Pass the model itself."),
    ],
    "RotaryPositionalEmbedding": [
        (lambda: RotaryPositionalEmbedding(4)(tokens),
         "x of shape [B, N, 4] or [B, H, N, 4]; got a tensor of shape (1, 5, 8).... Build it with the width that ..."),
        (lambda: RotaryPositionalEmbedding(8)(tokens, 4), "seq_len 5, as x has tokens; got 4. Leave it out."),
        (lambda: RotaryPositionalEmbedding(8, 4)(tokens),
         "at most max_seq_len=4 tokens; got 5. Build it with a larger one."),
    ],
    "sampled_loss": [
        (lambda: sampled_loss(ones(2, 3).long()),
         "scores to be floating point, [..., classes]; got ...(2, 3)... int64. Pass the model's output, with ..."),
    ],
    "ScaledDotProductAttention": [
        (lambda: ScaledDotProductAttention()(x(), x(), x(), zeros(4, 6, 6), position=Scale(1.0)),
         "relative_position_bias or position; got both. Add them: position = terms + DenseBias(bias)."),
        (lambda: ScaledDotProductAttention()(x(), x(), x(), zeros(6, 6)),
         "relative_position_bias to be a tensor with 3 dimensions; got ...(6, 6).... Reshape ..."),
        (lambda: ScaledDotProductAttention()(x(), x(), x(), zeros(4, 6, 7)),
         "DenseBias of shape [1 or 2, 1 or 4, 1 or 6, 1 or 6]; got ...(1, 4, 6, 7).... Build it for the same q, ..."),
    ],
    "Sophia": [
        (lambda: Sophia([weight]).update_hessian(4),
         "gradients of sampled_loss; got none. Call sampled_loss(model(x)).backward() first."),
    ],
    "SwinTransformer": [
        (lambda: swin(version=3), "version to be 1 or 2; got int 3. They differ in norms, attention and position."),
        (lambda: swin(depths=2), "depths as a number for each stage; got int 2. Pass for example depths=(2, 2, 6, 2)."),
        (lambda: swin(depths=(1, 1)), "as many num_heads as depths; got 2 and 1. Each stage needs one of each."),
        (lambda: swin(position="rotary_1"),
         "the name of a position; got 'rotary_1'. Did you mean..."),
        (lambda: swin(window_size=0),
         "window_size to be an integer of at least 1; got int 0. Pass a larger one."),
        (lambda: swin()(zeros(2, 1, 8, 8)),
         "floating-point images of shape [B, 3, rows, columns]; got ...(2, 1, 8, 8).... Check in_chans, and ..."),
        (lambda: swin(position="learned").grow(16, "clipped"),
         "a growth rule of its mechanisms (interpolated); got 'clipped'. Build a model for that size."),
    ],
    "TransformerBlock": [
        (lambda: TransformerBlock(32, 4)(zeros(2, 6, 31)),
         "floating-point tokens of shape [B, N, 32]; got a tensor of shape (2, 6, 31).... Layout is [batch, ..."),
        (lambda: TransformerBlock(30, 4), "dim to be a multiple of num_heads; got 30 and 4. Change one of them."),
        (lambda: TransformerBlock(32, 4)(zeros(2, 6, 32, dtype=torch.float64)),
         "tokens in float32, as the layer's weights are; got ...(2, 6, 32)... float64. Convert one of them with ..."),
        (lambda: TransformerBlock(32, 4, mlp_hidden=0),
         "hidden_features to be an integer of at least 1; got int 0. Pass a larger one."),
    ],
    "VisionTransformer": [
        (lambda: vit(class_token=False),
         'a class token to pool; got class_token=False. Use global_pool="avg" or "max".'),
        (lambda: vit(img_size=9),
         "an image size divisible by the patch size (2, 2); got (9, 9). Pad or crop the image, or choose another ..."),
        (lambda: vit(num_heads=3), "dim to be a multiple of num_heads; got 16 and 3. Change one of them."),
        (lambda: vit(position="relative2d"),
         "the name of a position; got 'relative2d'. Did you mean 'relative_2d'? Such as ..."),
        (lambda: vit(position="learned+"),
         "the name of a position; got ''. Such as ..."),
        (lambda: vit(position=TABLE),
         "position to be a preset's name, a function from a Site to ...; got RelativePositionBias(...). Wrap a ..."),
        (lambda: vit(position=3),
         "position to be a preset's name, a function from a Site to a mechanism,...; got int 3. Wrap a finished ..."),
        (lambda: vit(position=lambda s: None),
         "position to return a mechanism for a Site; got None. Return a relpos.Mechanism."),
        (lambda: vit()(zeros(2, 3, 8, 8)),
         "floating-point images of shape [B, 1, rows, columns]; got ...(2, 3, 8, 8).... Check in_chans, and ..."),
        (lambda: vit()(zeros(2, 1, 10, 10)), "a grid of (4, 4); got (5, 5). Resize it first: mechanism.resize(sizes)."),
        (lambda: vit()(zeros(1, 8, 8)),
         "floating-point images of shape [B, 1, rows, columns]; got ...(1, 8, 8).... Check in_chans, and convert ..."),
        (lambda: vit().grow(10, "clipped"),
         "a growth rule of LearnedPositionEmbedding (it has interpolated); got 'clipped'. A mechanism without ..."),
        (lambda: vit().grow(9, "interpolated"),
         "an image size divisible by the patch size (2, 2); got (9, 9). Pad or crop the image, or choose another ..."),
        (lambda: vit()(zeros(2, 1, 8, 8, device=META)),
         "images on cpu; got meta. Move the images or the module with .to(device). Tensors on meta have no ..."),
        (lambda: vit(distilled=True, global_pool="avg"),
         "global_pool=\"token\" with distilled=True; got 'avg'. Its two heads read two tokens."),
    ],
}
# fmt: on
