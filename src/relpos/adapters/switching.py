"""`set_attn_implementation` of models whose configuration is switched: our functions stay in front of what it sets.

The library's method writes a name into configurations, its own and those of the models within, and takes the name of
our functions away with it. So models of the library that hold a switched module have a method of their own, an
attribute of the instance: it calls the library's, and switches again. Another implementation than those we stand in
front of is refused, and changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from relpos.adapters import interface
from relpos.adapters.above import Above
from relpos.adapters.retrofitted import is_swapped, route
from relpos.core.checks import fail

_METHOD = "set_attn_implementation"


def follow(model: nn.Module) -> None:
    """Let the models in a model follow what is set where they hold a switched module, and the others no more."""
    for one in model.modules():
        if hasattr(type(one), _METHOD):
            one.__dict__.pop(_METHOD, None)
            if _switched(one):
                one.__dict__[_METHOD] = partial(_set, Above(one))


def _switched(model: nn.Module) -> dict[int, Any]:
    """The configurations in a model that our functions are selected by."""
    swapped: list[Any] = [one for one in model.modules() if is_swapped(one) and route(one).switched]
    return {id(one.config): one.config for one in swapped}


def _set(above: Above, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
    """The library's method, and our functions in front of what it sets.

    Raises:
        ValueError: our functions stand in front of no such implementation.
    """
    model: Any = above()
    configs = [one.config for one in model.modules() if hasattr(one, "config")]
    before = [(one, one._attn_implementation_internal) for one in configs if hasattr(one, interface.SELECTS)]
    try:
        getattr(type(model), _METHOD)(model, attn_implementation, *args, **kwargs)
        for config in _switched(model).values():
            own = interface.implementation(config)
            if own not in interface.SERVED:
                replaced = any(hasattr(one, "attend_placed") for one in model.modules())
                remedy = f"Leave it; {interface.LOST}" if replaced else "Call relpos.restore(model) first."
                fail("attn_implementation sdpa or eager, of a model that relpos has changed", own, remedy)
    except BaseException:
        for config, own in before:
            config._attn_implementation_internal = own
        raise
    for config in _switched(model).values():
        interface.switch(config)
