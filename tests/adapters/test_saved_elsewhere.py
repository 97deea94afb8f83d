"""Mechanisms of relpos inside models of transformers and PEFT: their settings are saved and compared there, too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import relpos
from relpos.adapters.common.libraries import imported
from relpos.position.base.saved_settings import is_settings

pytestmark = pytest.mark.usefixtures("unchecked")
X = torch.linspace(-1, 1, 96).view(1, 6, 16)


def model(base: float = 1e4) -> Any:
    """A model of a person's own, in transformers' classes."""
    transformers = imported("transformers")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
        model_type = "of a person's own"

    class Model(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            position = relpos.RotaryEmbedding(8, base=config.base) + relpos.T5Bias(2)
            self.first = relpos.MultiHeadAttention(16, 2, position=position)
            self.second = relpos.MultiHeadAttention(16, 2, position=relpos.RelativePositionBias(2, (2, 3)))
            self.last = nn.Linear(16, 16)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None: ...

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.second(self.first(x), coordinates=relpos.Grid(2, 3)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Model(Config(base=base)).eval()


@torch.no_grad()
def test_a_model_of_transformers(tmp_path: Path) -> None:
    own = model()
    own.save_pretrained(tmp_path)
    again, about = type(own).from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(again.eval()(X), own(X))
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    with pytest.raises(ValueError, match="RotaryEmbedding saved with base=20000; got base=10000"):
        type(own).from_pretrained(tmp_path, config=model(base=2e4).config)
    file = tmp_path / "model.safetensors"
    before = {name: x for name, x in load_file(file).items() if not is_settings(name)}
    save_file(before, file, metadata={"format": "pt"})
    again, about = type(own).from_pretrained(tmp_path, output_loading_info=True)  # which says in its own way what lacks
    assert torch.equal(again.eval()(X), own(X))
    assert all(map(is_settings, about["missing_keys"]))
    again.to("cpu").load_state_dict(own.state_dict())


@torch.no_grad()
def test_a_mechanism_that_peft_trains_and_saves_whole(tmp_path: Path) -> None:
    peft = imported("peft")
    config = peft.LoraConfig(target_modules=["last"], modules_to_save=["position"])
    adapted = peft.get_peft_model(model(), config)
    for name, x in adapted.named_parameters():
        if "modules_to_save" in name:
            x.copy_(torch.randn_like(x))
    adapted.eval().save_pretrained(tmp_path)
    assert any(map(is_settings, load_file(tmp_path / "adapter_model.safetensors")))
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path)
    torch.testing.assert_close(loaded(X), adapted(X))
    torch.testing.assert_close(loaded.merge_and_unload()(X), adapted(X))
    with pytest.raises(ValueError, match="saved with base=20000; got base=10000"):
        peft.PeftModel.from_pretrained(model(base=2e4), tmp_path)


@torch.no_grad()
def test_weights_of_a_model_whose_position_was_replaced(tmp_path: Path) -> None:
    timm = imported("timm")
    made = []
    for layout in ("interleaved", "interleaved", "half"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2)
        relpos.replace_position(
            model.eval(), lambda site, layout=layout: relpos.RotaryEmbedding(site.head_dim, axes=2, layout=layout)
        )
        made.append(model)
    save_file(made[0].state_dict(), tmp_path / "m.safetensors")
    weights, x = load_file(tmp_path / "m.safetensors"), torch.randn(1, 3, 32, 32)
    made[1].load_state_dict(weights)
    assert torch.equal(made[1](x), made[0](x))
    with pytest.raises(ValueError, match=r"RotaryEmbedding positions\.0\.mechanisms\.0 saved with layout=.half.; got"):
        made[2].load_state_dict(weights)
    relpos.restore(made[0])
    assert not any(map(is_settings, made[0].state_dict()))
