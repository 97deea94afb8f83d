"""PEFT's adapters in retrofitted models: before the retrofit and after it, on every linear layer and table inside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_text import writer
from torch import nn

import relpos
from models import assert_same, models, padding, step, tokens
from relpos.adapters.common.kinds import path_of, replaced_classes
from relpos.adapters.common.libraries import imported

FAST_CASES = 2  # of each of its tests, in the fast part
WITHOUT = ("efficientformer_v2", "bottleneck", "torchvision")
LINEAR = [
    name for name, model in models().items() if "alike" not in model.tags and not any(one in name for one in WITHOUT)
]
"""Models whose attention calls a linear layer; the others' is made of convolutions, or reads the weights of a layer
(torchvision), which an adapter leaves alone."""
VERIFIED = ("t5 encoder, eager", "deberta_v2", "wavlm", "beit", "swin", "sam")
"""Those that have adapters before the retrofit; the others have them after it."""


def _inside(model: nn.Module) -> list[str]:
    """The linear layers and tables in what a retrofit replaces."""
    found = set()
    for name, module in model.named_modules():
        if path_of(type(module)) in replaced_classes():
            for part, one in module.named_modules(prefix=name):
                grouped = type(one).__name__ == "DeepseekV4GroupedLinear"  # LoRA adds another shape to it
                if isinstance(one, nn.Linear | nn.Embedding) and not grouped:
                    found.add(part)
    assert found
    return sorted(found)


def _adapted(model: nn.Module, targets: list[str]) -> nn.Module:
    """With LoRA that says something."""
    peft = imported("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora" in name:
                x.copy_(torch.randn(x.shape, generator=generator) * 0.1)
    return model.double()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("name", LINEAR)
def test_lora_computes_and_trains_as_published(name: str) -> None:
    model = models()[name]
    module, other = model.made(), model.made()
    targets = _inside(module)
    if name == "udop":  # whose published code asks a table for its num_embeddings, which an adapter lacks
        targets = [target for target in targets if "relative_attention_bias" not in target]
    published = step(model, _adapted(module, targets))
    if name in VERIFIED:
        assert relpos.retrofit(_adapted(other, targets), border=0).verified
    else:
        relpos.retrofit(other, border=0, verify=False)
        _adapted(other, targets)
    assert_same(step(model, other), published, model.exact)


KINDS: dict[str, Any] = {
    "lora": lambda peft: peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "k", "v"]),
    "dora": lambda peft: peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"], use_dora=True),
    "a table that is trained whole": lambda peft: peft.LoraConfig(
        task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q"], modules_to_save=["relative_attention_bias"]
    ),
    "ia3": lambda peft: peft.IA3Config(task_type="SEQ_2_SEQ_LM"),
    "prefixes": lambda peft: peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3),
    "prompts": lambda peft: peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_step_of_t5(kind: str) -> None:
    inputs = {"input_ids": tokens(2, 11), "attention_mask": padding(2, 11), "labels": tokens(2, 5, seed=1)}
    peft, losses = imported("peft"), []
    for retrofitted in (False, True):
        model = writer(dropout_rate=0.0)
        if retrofitted:
            relpos.retrofit(model, border=0, verify=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, KINDS[kind](peft))
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            steps.append(float(loss.detach()))
        losses.append(steps)
    assert losses[0][0] - losses[0][-1] > 1e-4, "it learns"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_adapters_that_a_retrofitted_model_trained_are_saved_loaded_and_merged(tmp_path: Path) -> None:
    inputs = {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 5, seed=1)}
    model = writer(dropout_rate=0.0)
    relpos.retrofit(model, border=0, verify=False)
    peft = imported("peft")
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "relative_attention_bias"])
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if "lora" in name:
                nn.init.normal_(x, std=0.1)
        adapted.save_pretrained(tmp_path)
        wanted = adapted(**inputs).logits
        assert float((wanted - writer(dropout_rate=0.0)(**inputs).logits).abs().max()) > 1e-3
        loaded = peft.PeftModel.from_pretrained(writer(dropout_rate=0.0), tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
        relpos.restore(merged)
        torch.testing.assert_close(merged(**inputs).logits, wanted, rtol=1e-5, atol=1e-5)
