"""How the queries, keys and values of a layer meet: by a softmax, without one, or by a softmax in tiles.

softmax     `relpos.attention`: any position, any mask, any engine
linear      `relpos.linear_attention` with elu + 1: a rotation or no position, causal or not
tiles       `relpos.flash_attention`: a line bias, a rotation or neither, causal or not
"""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, Mask, Rotation, Term, Terms, content
from relpos.engines import attention, flash_attention, linear_attention

Product = Literal["softmax", "linear", "tiles"]
PRODUCTS: tuple[Product, ...] = get_args(Product)


def meet(
    product: Product,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    v: Float[Tensor, "B G M D"],
    *,
    position: Terms | Term | None,
    mask: Mask | None,
    dropout: float,
    backend: str,
) -> Float[Tensor, "B H N D"]:
    """The attended values, by the product of a name.

    Raises:
        NotImplementedError: a position, a mask or dropout that a product other than "softmax" lacks.
    """
    if product == "softmax":
        attended = attention(q, k, v, position=position, mask=mask, dropout=dropout, backend=backend)
        assert isinstance(attended, Tensor)
        return attended
    if dropout:
        _lacks(product, "no dropout of attention weights", f"{dropout:g}")
    if mask is not None and not mask.is_plain_causal:
        _lacks(product, "a causal mask or none", "another mask")
    causal = mask is not None
    if product == "linear":
        return linear_attention(q, k, v, causal=causal, position=position)
    terms = Terms() if position is None else position if isinstance(position, Terms) else Terms(position)
    biases, rest = terms.of(LineBias), [term for term in terms if not isinstance(term, LineBias)]
    if len(biases) > 1 or any(not isinstance(term, Rotation) for term in rest):
        _lacks(product, "a line bias, a rotation or both as position", ", ".join(type(t).__name__ for t in terms))
    for term in rest:
        term.check(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k = content(Terms(*rest), q, k)
    return flash_attention(q, k, v, bias=biases[0] if biases else None, causal=causal)


def _lacks(product: Product, expected: str, came: str) -> None:
    raise NotImplementedError(f"expected {expected}; got {came}, which product={product!r} lacks. Use 'softmax'.")
