"""Sample the next token: temperature, then the top k, then the nucleus.

The nucleus of mass p (Holtzman et al. 2020, section 3.1) is the smallest set of most likely tokens that together have
probability p. With k too, it is taken from the k tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import at_least_float32
from relpos.core.checks import fail, require_int, require_number, shape_of


def require_sampling(temperature: object, top_k: object, top_p: object) -> None:
    """Raise unless these are valid sampling settings."""
    require_number(temperature, "temperature", "of at least 0", "0 takes the likeliest token.")
    if top_k is not None:
        require_int(top_k, "top_k", at_least=1)
    if top_p is not None:
        require_number(top_p, "top_p", "above 0", "Leave it out to draw from all.")
        if isinstance(top_p, int | float) and top_p > 1:
            fail(
                "top_p to be at most 1",
                shape_of(top_p),
                "It is a probability, such as 0.9; leave it out to draw from all.",
            )


def sample(
    logits: Float[Tensor, "B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B 1"]:
    """Sample one token per row.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely; ties with the last one stay.
        top_p: only the nucleus of this mass.
    """
    require_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = at_least_float32(logits)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / float(temperature)  # the maximum stays finite
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None:
        probability, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        beyond = probability.cumsum(dim=-1) - probability >= top_p  # earlier tokens reach p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
