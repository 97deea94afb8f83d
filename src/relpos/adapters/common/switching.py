"""`set_attn_implementation` of models with a switched configuration: the configuration stays switched.

The library's method writes an implementation's name into the configurations of the model and of the models within, and
so overwrites the name of our functions. Therefore models of the library that hold a switched module get their own
method, an attribute of the instance: it calls the library's and switches again. An implementation that ours do not
serve is refused, and nothing changes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from relpos.adapters.common import interface
from relpos.adapters.common.above import Above
from relpos.adapters.common.retrofitted import is_swapped, route
from relpos.core.checks import fail

_METHOD = "set_attn_implementation"


def follow(model: nn.Module) -> None:
    """Set our method on the models within a model that hold a switched module, and remove it from the others."""
    for one in model.modules():
        if hasattr(type(one), _METHOD):
            one.__dict__.pop(_METHOD, None)
            if _switched(one):
                one.__dict__[_METHOD] = partial(_set, Above(one))


def _switched(model: nn.Module) -> dict[int, Any]:
    """The configurations in a model that select our functions."""
    swapped: list[Any] = [one for one in model.modules() if is_swapped(one) and route(one).switched]
    return {id(one.config): one.config for one in swapped}


def _set(above: Above, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
    """Call the library's method, then switch the configurations again.

    Raises:
        ValueError: our functions do not serve this implementation.
    """
    model: Any = above()
    configs = [one.config for one in model.modules() if hasattr(one, "config")]
    before = [(one, one._attn_implementation_internal) for one in configs if hasattr(one, interface.SELECTS)]
    try:
        getattr(type(model), _METHOD)(model, attn_implementation, *args, **kwargs)
        for config in _switched(model).values():
            own = interface.implementation(config)
            if own not in interface.SERVED:
                replaced = any(hasattr(one, "attend_repositioned") for one in model.modules())
                remedy = f"Leave it; {interface.LOST}" if replaced else "Call relpos.restore(model) first."
                fail("attn_implementation sdpa or eager, because relpos has changed this model", own, remedy)
    except BaseException:
        for config, own in before:
            config._attn_implementation_internal = own
        raise
    for config in _switched(model).values():
        interface.switch(config)
