"""PEFT beside a replaced position: `modules_to_save=["positions"]` trains, saves, switches and merges it."""

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from replaced_models import FAMILIES, Family, gpt2, llama
from torch import Tensor

import relpos
from models import tokens
from relpos.adapters.common.libraries import imported

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 2  # of each of its tests, in the fast part
TARGETS = {
    "timm ViT": "qkv", "ViT": "q_proj", "BEiT": "proj", "Swin": "qkv", "BERT": "query", "GPT-2": "c_attn",
    "Llama": "v_proj", "T5": "q", "PyTorch": "linear1",
}  # fmt: skip
FROZEN = r"position of \w+ is trainable but frozen while.*modules_to_save=\[\"positions\"\].*trainable=False"


def lora(target: str, **more: Any) -> Any:
    options = {"modules_to_save": ["positions"], "fan_in_fan_out": target in ("c_attn", "all-linear"), **more}
    targets = target if target == "all-linear" else [target]
    return imported("peft").LoraConfig(r=2, target_modules=targets, **options)


def adapted(model: Any, target: str, **more: Any) -> Any:
    return imported("peft").get_peft_model(model, lora(target, **more))


def trained(model: Any, family: Family, rate: float = 0.1) -> None:
    """A step of what is trained, which reaches every table."""
    model.train()
    out = family.called(model)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    with torch.no_grad():
        for name, x in model.named_parameters():
            own = f".{model.active_adapter}." in name and ("lora_" in name or "modules_to_save." in name)
            assert x.requires_grad == own, name
            if own:
                assert x.grad is not None, name
                x.sub_(rate * x.grad / x.grad.abs().max().clamp(min=1e-12))
    model.zero_grad()
    model.eval()


def apart(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max()).detach())


def tables(model: Any, part: str) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters() if "positions." in name and part in name}


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_are_trained_saved_loaded_switched_and_merged(name: str, tmp_path: Path) -> None:
    family, peft = FAMILIES[name], imported("peft")
    base = family.replaced()
    start = family.called(base).detach()
    model = adapted(base, TARGETS[name]).double()
    torch.testing.assert_close(family.called(model), start, msg="a copy says the same")
    before, kept = tables(model, "modules_to_save.default."), tables(model, "original_module.")
    assert before
    assert len(before) == len(kept)
    for _ in range(2):  # LoRA's second factor starts from 0
        trained(model, family)
    after = tables(model, "modules_to_save.default.")
    assert all(not torch.equal(x, before[key]) for key, x in after.items()), "every table moves"
    assert all(torch.equal(x, kept[key]) for key, x in tables(model, "original_module.").items())
    first = family.called(model).detach()
    assert apart(first, start) > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(family.called(model), start, msg="without the adapter it is the base")

    model.save_pretrained(tmp_path)
    fresh = family.published()
    relpos.replace_position(fresh, family.position, **family.options)  # whose tables start from 0
    again = peft.PeftModel.from_pretrained(fresh, tmp_path).double().eval()  # the factors of LoRA in float32
    torch.testing.assert_close(family.called(again), first, rtol=1e-5, atol=1e-5)
    loaded = tables(again, "modules_to_save.default.")
    assert loaded.keys() == after.keys()
    assert all(torch.equal(x, after[key]) for key, x in loaded.items())

    model.add_adapter("second", lora(TARGETS[name]))
    model.add_adapter("bare", lora(TARGETS[name], modules_to_save=None))
    model.double().set_adapter("second")
    for _ in range(2):
        trained(model, family, rate=0.3)
    second = family.called(model).detach()
    assert apart(second, first) > 1e-3
    model.set_adapter("bare")
    torch.testing.assert_close(family.called(model), start, msg="an adapter that has no positions leaves the base's")
    model.set_adapter("default")
    assert torch.equal(family.called(model), first)

    with pytest.raises(ValueError, match=r"positions without a wrapper; got .*ModulesToSaveWrapper.*merge_and_unload"):
        relpos.restore(model)
    assert torch.equal(family.called(model), first), "nothing was changed"
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        other.set_adapter("second")
        assert torch.equal(family.called(other), second), "a copy has mechanisms of its own"
    merged = model.merge_and_unload()
    torch.testing.assert_close(family.called(merged), first)
    relpos.restore(merged)
    assert not any("positions" in module._modules for module in merged.modules())
    own = family.published()
    own.load_state_dict({key: x for key, x in merged.state_dict().items() if key in own.state_dict()})
    torch.testing.assert_close(family.called(merged), family.called(own))


CHOICES: dict[str, Any] = {
    "shared": {"position": "relative_1d", "shared": True},
    "a network, and every linear layer of the model": {"position": "fire"},
    "nothing to learn": {"position": "alibi"},
    "learned, and a rotation": {"position": "learned+rotary_1d"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_other_positions_and_settings(name: str, tmp_path: Path) -> None:
    def replaced() -> Any:
        torch.manual_seed(0)
        model = gpt2()
        relpos.replace_position(model, init_std=0.5, **CHOICES[name])
        return model

    family = FAMILIES["GPT-2"]
    model = adapted(replaced(), "all-linear").double()
    assert not any("lora_" in key and "positions." in key for key, _ in model.named_parameters())
    for _ in range(2):
        trained(model, family)
    wanted = family.called(model)
    model.save_pretrained(tmp_path)
    again = imported("peft").PeftModel.from_pretrained(replaced(), tmp_path).double().eval()
    torch.testing.assert_close(family.called(again), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(family.called(model.merge_and_unload()), wanted)


def test_modules_that_ask_for_positions_are_copied_too() -> None:
    """A copy of GPT-2's `wpe` by PEFT asks for the positions that are in use, not for some of its own."""
    family = FAMILIES["GPT-2"]
    model = adapted(family.replaced(), "c_attn", modules_to_save=["positions", "wpe"]).double()
    table = next(x for name, x in model.named_parameters() if "modules_to_save" in name and "pos_embed" in name)
    before = family.called(model)
    with torch.no_grad():
        table.add_(torch.randn_like(table))
    assert apart(family.called(model), before) > 1e-3


def test_several_adapters_in_one_batch_are_refused() -> None:
    """Rows share a position: PEFT would have given all of them that of the active adapter."""
    own = relpos.LanguageModel(90, 12, 16, 1, 2, position="relative_1d")
    for base, target, words in ((FAMILIES["BERT"].replaced(), "query", "input_ids"), (own, "proj", "tokens")):
        line = "expected one adapter for all rows, which share their position; got adapter_names. Call the model"
        with pytest.raises(ValueError, match=line):
            adapted(base, target).eval()(**{words: tokens(2, 12)}, adapter_names=["default", "__base__"])


def test_transformers_own_interface_trains_positions() -> None:
    family = FAMILIES["Llama"]
    model = family.replaced()
    model.add_adapter(lora("v_proj"), "mine")
    learned = {name for name, x in model.named_parameters() if x.requires_grad and "positions." in name}
    assert learned
    assert all("modules_to_save.mine." in name for name in learned)
    family.called(model.double().train()).sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in learned)


OWN: dict[str, Any] = {
    "language": (lambda: relpos.LanguageModel(90, 12, 16, 2, 2, position="learned+relative_1d"), tokens(4, 12)),
    "vit": (
        lambda: relpos.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3, position="learned+relative_2d"
        ),
        torch.randn(4, 3, 8, 8),
    ),
    "swin": (
        lambda: relpos.SwinTransformer(
            img_size=16, patch_size=2, num_classes=3, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4
        ),
        torch.randn(4, 3, 16, 16),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_models_of_relpos_take_the_same_name(name: str) -> None:
    torch.manual_seed(0)
    build, x = OWN[name]
    base = build().eval()
    state = copy.deepcopy(base.state_dict())
    start = base(x)
    model = adapted(base, "fc1").eval()
    torch.testing.assert_close(model(x), start)
    before = tables(model, "modules_to_save.")
    model(x).square().sum().backward()
    learned = {name: x for name, x in model.named_parameters() if name in before}
    assert learned
    assert all(x.grad is not None and x.requires_grad for x in learned.values())
    with torch.no_grad():
        for table in learned.values():
            table.add_(torch.randn_like(table))
    moved = model(x)
    assert apart(moved, start) > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(model(x), start)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), moved)
    assert merged.state_dict().keys() == state.keys()


# Frozen at its start


def loss(model: Any, call: Any) -> Tensor:
    return call(model.train()).square().mean()


def read(model: Any) -> Tensor:
    return model(input_ids=tokens(2, 6)).logits


def warned(calls: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls()
    return [str(one.message) for one in caught if "keeps its initial values" in str(one.message)]


@pytest.mark.parametrize("name", ["timm ViT", "Swin", "GPT-2", "T5", "PyTorch"])
def test_lora_alone_warns_once_that_the_position_stays_at_its_start(name: str) -> None:
    family = FAMILIES[name]
    model = family.published()
    relpos.replace_position(model, family.position, **family.options)
    model = adapted(model, TARGETS[name], modules_to_save=None).double()
    with torch.no_grad():
        family.called(model.train())
    family.called(model.eval())
    with pytest.warns(RuntimeWarning, match=FROZEN) as caught:
        loss(model, family.called).backward()
    assert len(caught) == 1, "one, of however many stacks"
    loss(model, family.called).backward()
    loss(copy.deepcopy(model), family.called).backward()


def _head_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


@pytest.mark.parametrize("position", ["relative_1d", "fire", "learned"])
def test_other_ways_to_train_beside_a_frozen_position(position: str) -> None:
    inputs = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    for freeze, call in (
        (_head_alone, read),
        (lambda model: model.requires_grad_(False), lambda model: model(inputs_embeds=inputs).logits),
        (lambda model: _head_alone(model.bfloat16().double()), read),  # after a cast and a move
    ):
        model = llama(tie_word_embeddings=False)
        relpos.replace_position(model, position)
        assert not warned(partial(loss, model, call))
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        freeze(model)
        with pytest.warns(RuntimeWarning, match=FROZEN):
            loss(model, call).backward()


def _mechanisms_one_by_one(model: Any) -> None:
    for position in model.model.positions:
        position.trainable = False


def _trained_before(model: Any) -> None:
    optimizer = torch.optim.SGD(model.model.positions.parameters(), lr=0.1)
    loss(model, read).backward()
    optimizer.step()


def _assigned(model: Any) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


MEANT: dict[str, Any] = {
    "trainable=False": ({"trainable": False}, lambda model: None),
    "mechanisms, by trainable": ({}, _mechanisms_one_by_one),
    "positions, by requires_grad_": ({}, lambda model: model.model.positions.requires_grad_(False)),
    "a position that was trained": ({}, _trained_before),
    "a position that was loaded": ({}, lambda model: model.load_state_dict(model.state_dict())),
    "a position that was assigned": ({}, _assigned),
    "a position that learns nothing": ({"position": "alibi"}, lambda model: None),
}


@pytest.mark.parametrize("name", MEANT)
def test_who_means_it_is_not_warned(name: str) -> None:
    options, prepare = MEANT[name]
    model = llama()
    relpos.replace_position(model, **{"position": "relative_1d", **options})
    prepare(model)
    model = adapted(model, "v_proj", modules_to_save=None).double()
    assert not warned(lambda: loss(model, read).backward())


def test_a_model_that_nobody_trains_is_not_warned_of() -> None:
    model = llama()
    relpos.replace_position(model, "relative_1d")
    model.requires_grad_(False)
    assert not warned(partial(read, model.train()))
