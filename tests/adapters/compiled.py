"""`python compiled.py`: models whose position was replaced, and retrofitted ones, compiled as one graph each.

Outputs and gradients are those without the compiler; `fullgraph` raises where a graph breaks. All in one process, which
loads their libraries once; `test_compiled.py` reads what it prints.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from models_text import inkling, inkling2, writer
from replaced_models import ONE_LAYER, Family
from torch import Tensor, nn

import relpos
from models import Model, models, tokens
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped, route

TO_THE_END = ("timm ViT", "PyTorch")  # others are traced alone: most of the time is the compiler's
REPLACED = {**ONE_LAYER, "ViT": replace(ONE_LAYER["ViT"], position="learned")}
"""ViT attends as GPT-2 does, which has a mechanism in attention."""
_ONE: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["hybrid"], "mlp_layer_types": ["dense"]}
_TWO: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]}
RETROFITTED = {name: models()[name] for name in ("t5 encoder, eager", "beit")} | {
    "inkling": replace(models()["inkling"], build=partial(inkling, **_ONE)),
    "inkling2": replace(models()["inkling2"], build=partial(inkling2, **_TWO)),
}
"""With each class of attention once; T5 hands the bias of its first layer on to the second."""
compiled = partial(torch.compile, fullgraph=True, backend="eager")


def _slopes(model: nn.Module, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs).backward()  # type: ignore[union-attr]
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _compare(model: Any, called: Callable[[Any], tuple[Tensor, ...]], backend: str) -> None:
    torch._dynamo.utils.counters.clear()
    eager, own = called(model), called(torch.compile(model, fullgraph=True, backend=backend))
    for x, y in zip(own, eager, strict=True):
        assert float((x - y).detach().abs().max()) <= 1e-4 * float(y.detach().abs().max())
    wanted, came = _slopes(model, eager), _slopes(model, own)
    assert wanted.keys() <= came.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, x in came.items():  # the compiler gives zeros to what the call leaves out
        assert float((x - wanted.get(name, 0)).abs().max()) <= 1e-4 * largest, name
    assert sum(torch._dynamo.utils.counters["stats"].values()) > 0


def replaced(name: str, family: Family) -> None:
    model = family.replaced()
    if name == "PyTorch":  # wrapped, too
        peft = imported("peft")
        model = peft.get_peft_model(model, _lora(peft, modules_to_save=["positions"])).eval()
    model = model.float()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # torch below 2.13 does not trace how transformers makes one
    _compare(model, lambda one: (family.called(one),), "aot_eager" if name in TO_THE_END else "eager")
    assert any("positions." in key for key, x in model.named_parameters() if x.grad is not None)


def _lora(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(target_modules=["linear1"], **more)


def frozen_beside_lora(family: Family) -> None:
    """A mechanism that PEFT froze at its start warns while it is compiled, once."""
    peft, model = imported("peft"), family.published()
    relpos.replace_position(model, family.position, **family.options)
    step = compiled(peft.get_peft_model(model, _lora(peft)).float().train())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            family.called(step)
    said = [str(one.message) for one in caught]
    assert sum("keeps its initial values" in one for one in said) == 1, said


def retrofitted(name: str, model: Model) -> None:
    module = model.made(torch.float32)
    relpos.retrofit(module, border=0, verify=False)
    routes = [route(one) for one in module.modules() if is_swapped(one)]
    for one in routes:
        one.forced = True
    _compare(module, model.called, "eager")
    # compiled by torch 2.10 and 2.11, transformers adds a mask to BEiT's bias, which is dense then
    taken = sum(one.forced_calls for one in routes)
    assert name == "beit" or taken > len(routes), "relpos computes what is compiled, too"


@torch.no_grad()
def attention_weights() -> None:
    """They are the published ones."""
    model = writer(attn_implementation="eager").encoder
    wanted = model(tokens(1, 9), output_attentions=True)
    relpos.retrofit(model, border=0, verify=False)
    got = compiled(model)(tokens(1, 9), output_attentions=True)
    assert all(torch.equal(x, y) for x, y in zip(got.attentions, wanted.attentions, strict=True))


def steps() -> Iterator[tuple[str, Callable[[], None]]]:
    """All that is compiled, by name."""
    for name, family in REPLACED.items():
        yield name, partial(replaced, name, family)
    yield "frozen beside LoRA", partial(frozen_beside_lora, REPLACED["PyTorch"])
    for name, model in RETROFITTED.items():
        yield f"{name}, retrofitted", partial(retrofitted, name, model)
    yield "attention weights", attention_weights


if __name__ == "__main__":
    imported("timm"), imported("transformers")
    for name, step in steps():
        torch._dynamo.reset()
        try:
            step()
            print("ok", name)
        except Exception as error:
            print("FAILED", name, repr(error)[-800:])
