"""Linear attention: without a softmax over scores, in time and memory linear in N.

    out_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = decay^|i - j| <phi(q_i), phi(k_j)>    over all j, or j <= i

Katharopoulos et al. 2020, "Transformers are RNNs", where phi is elu + 1. The sums over j are computed before the
product with q_i. Without causality these are two products of small matrices. Causal calls have three equivalent forms:

    quadratic   all w_ij, masked: the definition
    recurrent   one token after another, with a state [D, V] per head: for decoding
    chunked     the definition inside a chunk of tokens, the state between chunks: for training, in O(N)

Position enters in two ways, which can be combined. A rotation is applied to phi(q) and phi(k) in the numerator only,
because rotated features may be negative and sum to 0 (Su et al. 2021, "RoFormer", section 3.3). A decay per head gives
retention (Sun et al. 2023, "Retentive Network", equations 5 to 7), which has no denominator: `normalize=False`.

Efficient attention (Shen et al. 2021) has a softmax over the channels of q and over the tokens of k. The latter depends
on all tokens, so it is not causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import Rotation, Term, Terms, content
from relpos.core.checks import (
    NO_OTHER,
    fail,
    require_choice,
    require_device,
    require_flag,
    require_floating,
    require_int,
    shape_of,
    without_autocast,
)
from relpos.engines.arguments import require_alike

FeatureMap = Literal["elu", "relu", "softmax", "identity"]
Form = Literal["chunked", "recurrent", "quadratic"]
CHUNK = 64
"""The default number of tokens in a chunk."""


def linear_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M V"],
    *,
    feature_map: FeatureMap = "elu",
    causal: bool = False,
    position: Terms | Term | None = None,
    decay: Float[Tensor, " H"] | None = None,
    normalize: bool = True,
    form: Form = "chunked",
    chunk: int = CHUNK,
) -> Float[Tensor, "B H N V"]:
    """Linear attention (Katharopoulos et al. 2020).

    Args:
        q: queries.
        k: keys; G key heads serve H query heads in equal groups.
        v: values, as many as keys.
        feature_map: "elu" (elu + 1), "relu", "identity" (retention's), or "softmax": over the channels of q, and over
            the tokens of k.
        causal: whether token i sees tokens up to i only; N and M must be equal.
        position: a rotation, or None.
        decay: factor per head and token of distance, above 0 and at most 1; causal calls only.
        normalize: whether to divide by the sum of weights; rows whose weights sum to 0 give 0.
        form: how a causal call is computed; all forms are equivalent, "quadratic" takes O(N^2).
        chunk: the number of tokens in a chunk.

    Returns:
        `[B, H, N, V]`, in time linear in the tokens.

    Raises:
        ValueError: arguments do not fit together.
        NotImplementedError: a term is not a rotation.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> relpos.linear_attention(q, k, v, causal=True).shape
        torch.Size([1, 2, 10, 8])
    """
    require_flag(causal, "causal")
    require_flag(normalize, "normalize")
    _check(q, k, v, feature_map, causal, decay, chunk)
    require_choice(form, "form", get_args(Form))
    terms = _rotation(position)
    terms.check(q, k, v)
    own, groups = q.dtype, q.shape[1] // k.shape[1]
    wide = torch.promote_types(own, torch.float32)
    with without_autocast(q.device):
        q, k = _features(q.to(wide), k.to(wide), feature_map)
        k, v = (x.to(wide).repeat_interleave(groups, dim=1) for x in (k, v))
        rate = None if decay is None else decay.to(wide)
        run = _BY_FORM[form] if causal else _summed
        if not normalize:
            return run(*content(terms, q, k), v, rate, chunk).to(own)
        ones = v.new_ones(*v.shape[:3], 1)
        if len(terms):  # the denominator is not rotated
            out, total = run(*content(terms, q, k), v, rate, chunk), run(q, k, ones, rate, chunk)
        else:
            out, total = run(q, k, torch.cat([v, ones], dim=3), rate, chunk).split([v.shape[3], 1], dim=3)
        return (out / torch.where(total == 0, 1, total)).to(own)


def _check(
    q: Tensor, k: Tensor, v: Tensor, feature_map: object, causal: bool, decay: Tensor | None, chunk: int
) -> None:
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        require_floating(x, name, dims=4)
    require_alike(q, k, v)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        fail(
            "q [B, H, N, D], k [B, G, M, D] and v [B, G, M, V]",
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
            "Give all three the same batch, k and v the same heads and tokens, q and k the same width.",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        fail("query heads to be a multiple of key heads", f"{q.shape[1]} and {k.shape[1]}", "Change one of them.")
    require_choice(feature_map, "feature_map", get_args(FeatureMap), NO_OTHER)
    require_int(chunk, "chunk", at_least=1)
    if not causal:
        if decay is not None:
            fail("decay only in a causal call", "causal=False", "A sum over all tokens has no direction to decay in.")
        return
    if q.shape[2] != k.shape[2]:
        came = f"{q.shape[2]} and {k.shape[2]}"
        fail("as many queries as keys in a causal call", came, "Attend within one sequence.")
    if feature_map == "softmax":
        fail(
            "a feature map of single tokens in a causal call",
            "'softmax'",
            "It sums over all tokens; train with 'elu'.",
        )
    if decay is not None:
        fits = isinstance(decay, Tensor) and decay.is_floating_point() and tuple(decay.shape) == (q.shape[1],)
        if not fits:
            wanted = f"a tensor with one decay per query head, [{q.shape[1]}], in floating point"
            fail(wanted, shape_of(decay), "Values are above 0, at most 1.")
        require_device(decay, "the decay", q.device, "Move it with .to(device).")


def _rotation(position: Terms | Term | None) -> Terms:
    terms = Terms() if position is None else position if isinstance(position, Terms) else Terms(position)
    for term in terms:
        if isinstance(term, Rotation) and term.values:
            came = "a Rotation of values, which linear attention lacks. Use relpos.attention."
            raise NotImplementedError(f"expected a rotation of queries and keys, or nothing, as position; got {came}")
        if not isinstance(term, Rotation) or term.widens > 1:
            why = "for it maps queries and keys itself" if isinstance(term, Rotation) else "for it adds to scores"
            raise NotImplementedError(
                f"expected a rotation or nothing as position; got {type(term).__name__}, which linear attention lacks, "
                f"{why} under a softmax. Use relpos.attention."
            )
    return terms


def _features(q: Tensor, k: Tensor, name: FeatureMap) -> tuple[Tensor, Tensor]:
    match name:
        case "elu":
            return F.elu(q) + 1, F.elu(k) + 1
        case "relu":
            return q.relu(), k.relu()
        case "softmax":
            return q.softmax(dim=3), k.softmax(dim=2)
        case "identity":
            return q, k


def _summed(q: Tensor, k: Tensor, v: Tensor, rate: Tensor | None, chunk: int) -> Tensor:
    return q @ (k.mT @ v)


def _decays(n: int, rate: Tensor | None, x: Tensor) -> Tensor:
    """`decay ** (i - j)` if j <= i, else 0: `[1 or H, n, n]`."""
    tokens = torch.arange(n, device=x.device, dtype=x.dtype)
    distances = tokens[:, None] - tokens
    if rate is None:
        return torch.ones_like(distances)[None].tril()
    return (rate.view(-1, 1, 1) ** distances.clamp(min=0)).tril()


def _quadratic(q: Tensor, k: Tensor, v: Tensor, rate: Tensor | None, chunk: int) -> Tensor:
    return ((q @ k.mT) * _decays(q.shape[2], rate, q)) @ v


def _recurrent(q: Tensor, k: Tensor, v: Tensor, rate: Tensor | None, chunk: int) -> Tensor:
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    rows = []
    for n in range(q.shape[2]):
        state = state if rate is None else state * rate[:, None, None]
        state = state + k[:, :, n, :, None] * v[:, :, n, None, :]
        rows.append(q[:, :, n, None, :] @ state)
    return torch.cat(rows, dim=2) if rows else q.new_zeros(*q.shape[:3], v.shape[3])


def _chunked(q: Tensor, k: Tensor, v: Tensor, rate: Tensor | None, chunk: int) -> Tensor:
    n, size = q.shape[2], min(chunk, max(1, q.shape[2]))
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(2, (-1, size)) for x in (q, k, v))  # [B, H, chunks, size, .]
    weights = _decays(size, rate, q)
    inside = ((q @ k.mT) * weights[:, None]) @ v
    last = weights[:, None, -1, :, None]  # the weight of each token at the end of its chunk
    added = ((k * last).mT @ v).unbind(dim=2)
    if not added:
        return inside.flatten(2, 3)
    before = [torch.zeros_like(added[0])]
    for one in added[:-1]:
        kept = before[-1] if rate is None else before[-1] * (rate**size)[:, None, None]
        before.append(kept + one)
    fading = torch.ones_like(weights[:, :, 0]) if rate is None else weights[:, :, 0] * rate[:, None]
    across = (q * fading[:, None, :, None]) @ torch.stack(before, dim=2)
    return (inside + across).flatten(2, 3)[:, :, :n]


_BY_FORM: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]] = {
    "chunked": _chunked,
    "recurrent": _recurrent,
    "quadratic": _quadratic,
}
