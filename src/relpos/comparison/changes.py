"""Change some fields of a recipe: `recipe={"weight_decay": 0.1}`, `--set recipe.weight_decay=0.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

from relpos.core.checks import fail, require_flag, require_int, require_name, require_number, shape_of
from relpos.models.attention_choice import windows_of
from relpos.results import RecipeRecord
from relpos.train import Recipe, TextRecipe


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with these fields replaced.

    Unless the changes say otherwise, `steps` limits the warm-up to a fifth of the steps, and `optimizer` brings the
    learning rate and weight decay chosen for it.

    Raises:
        ValueError: no such field exists, or its value has the wrong type or is out of range.
    """
    known, hints = [field.name for field in fields(recipe)], get_type_hints(RecipeRecord)
    for name, value in changes.items():
        require_name(name, known, "a field of the recipe")
        _require_fit(name, value, hints[name])
    if "optimizer" in changes:
        recipe = recipe.by(changes["optimizer"])
    if "steps" in changes:
        warmup = min(recipe.warmup_steps, max(1, changes["steps"] // 5))
        recipe = replace(recipe, warmup_steps=warmup)
    if changes.get("window") is not None:
        window = changes["window"]
        changes = {**changes, "window": tuple(window) if isinstance(window, list | tuple) else (window,)}
    made = replace(recipe, **changes)
    if isinstance(made, TextRecipe):
        windows_of(made.window, made.attention, made.depth)
    return made


def _require_fit(name: str, value: Any, hint: Any) -> None:
    """Raise unless a value has the field's type; the model checks what names mean."""
    kinds = get_args(hint) or (hint,)
    if (value is None and NoneType in kinds) or name == "window":
        return
    if bool in kinds:
        require_flag(value, f"the recipe's {name}")
    elif float in kinds:
        require_number(value, f"the recipe's {name}", "of at least 0", "Choose another value.")
    elif int in kinds:
        require_int(value, f"the recipe's {name}", at_least=0 if name == "warmup_steps" else 1)
    elif not isinstance(value, str):
        fail(f"the recipe's {name} as a name", shape_of(value), "Write it in quotes.")
