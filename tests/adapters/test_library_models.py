"""Models of timm and transformers by name: built at the size of the data, as published but for their position."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import relpos
from models import SMALL
from relpos.adapters.common.libraries import imported
from relpos.adapters.library_models import LibraryModel
from relpos.adapters.torchvision_models import fitted_torchvision_model
from relpos.data import Task, find_data, find_task
from relpos.models import count_parameters
from relpos.optim import parameter_groups
from relpos.train import Procedure
from relpos_command.requests import CompareRequest

FAST_SHARE = 2  # of its tests, in the fast part

VIT, SWIN = "timm:vit_tiny_patch16_224", "timm:swin_tiny_patch4_window7_224"
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "vocab_size": 300}),
    "llama": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2, "vocab_size": 300}),
    "bert": ("BertConfig", {**SMALL, "vocab_size": 300}),
}


def saved(folder: Path, kind: str, **given: Any) -> str:
    """`hf:FOLDER` of a configuration."""
    getattr(imported("transformers"), kind)(**given).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def text() -> Task:
    return find_task("text")


@pytest.fixture(scope="module")
def digits() -> Task:
    return find_task("digits")


def scores(model: nn.Module, inputs: Tensor) -> Tensor:
    """In evaluation mode."""
    with torch.no_grad():
        output = model.eval()(inputs)
    found: Tensor = getattr(output, "logits", output)
    return found


def test_its_own_position_is_the_published_model(digits: Any) -> None:
    torch.manual_seed(3)
    built = LibraryModel(VIT)("own", digits)
    torch.manual_seed(3)
    sizes = {"img_size": digits.image_size, "patch_size": digits.patch_size}
    published = imported("timm").create_model(VIT[5:], num_classes=10, in_chans=1, **sizes)
    images, _ = next(digits.batches(2, 0))
    assert torch.equal(scores(built, images), scores(published, images))
    with torch.no_grad():
        published.pos_embed.zero_()
    assert not torch.equal(scores(built, images), scores(published, images)), "its position says something"


def test_models_of_torchvision_take_the_datas_patches_and_channels(digits: Any) -> None:
    images, _ = next(digits.batches(2, 0))
    build = LibraryModel("torchvision:swin_t")
    assert build.own_patch == (4, 4)
    model = build("rotary_2d", digits)
    assert scores(model, images).shape == (2, 10)
    assert model.features[0][0].kernel_size == digits.patch_size  # type: ignore[index, union-attr]
    assert LibraryModel("torchvision:vit_b_32").own_patch == (32, 32)
    with torch.device("meta"):  # it has 86 million numbers
        published: Any = fitted_torchvision_model("vit_b_32", digits)
    assert published.conv_proj.kernel_size == digits.patch_size
    assert scores(published, images.to("meta")).shape == (2, 10)


def test_position_is_off_with_none_and_on_with_a_mechanism(digits: Any) -> None:
    """Without position the patches of an image are a set."""
    images, _ = next(digits.batches(2, 0))
    rows, columns = digits.patch_size
    turned = images.roll(3 * rows, dims=2).roll(columns, dims=3)  # whole patches change places
    for position, alike in (("own", False), ("none", True), ("relative_2d", False)):
        torch.manual_seed(0)
        model = LibraryModel(VIT)(position, digits).double()
        apart = (scores(model, images.double()) - scores(model, turned.double())).abs().max().item()
        assert (apart < 1e-10) == alike, position


@pytest.mark.parametrize("kind", TEXTS)
def test_models_of_text_take_bytes(kind: str, tmp_path: Path, text: Any) -> None:
    config, given = TEXTS[kind]
    build = LibraryModel(saved(tmp_path, config, **given))
    inputs, _ = next(text.batches(2, 0))
    for position in ("own", "t5"):
        assert scores(build(position, text), inputs).shape == (2, text.length, 256)
    assert pickle.loads(pickle.dumps(build)) == build


def test_a_transformers_model_of_images(tmp_path: Path, digits: Any) -> None:
    build = LibraryModel(saved(tmp_path, "ViTConfig", **SMALL, image_size=224, patch_size=16))
    assert build.own_patch == (16, 16)
    images, _ = next(digits.batches(2, 0))
    for position in ("own", "rotary_2d"):
        assert scores(build(position, digits), images).shape == (2, 10)


def test_what_it_knows_of_position_is_trained_and_counted_as_position(digits: Any) -> None:
    model = LibraryModel(VIT)("own", digits)
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.5, position_learning_rate_multiplier=10.0)
    (position,) = [group for group in groups if group["multiplier"] == 10.0]
    assert [id(one) for one in position["params"]] == [id(model.pos_embed)]
    assert position["weight_decay"] == 0.0
    assert count_parameters(model)["position"].total == model.pos_embed.numel()
    replaced = LibraryModel(VIT)("relative_2d", digits)
    named = {name for name, _ in replaced.named_parameters() if name.startswith("positions.")}
    assert count_parameters(replaced)["position"].total == sum(replaced.get_parameter(one).numel() for one in named)


def test_trained_weights_are_loaded_and_what_starts_anew_is_said(tmp_path: Path, text: Any) -> None:
    config, given = TEXTS["gpt2"]
    transformers = imported("transformers")
    published = transformers.GPT2LMHeadModel(getattr(transformers, config)(**given))
    published.save_pretrained(tmp_path)
    name = f"hf:{tmp_path}"
    build = LibraryModel(name)
    assert build.notes(text) == [
        f"{name} starts from its trained weights; these start from random values, because they do not fit the data: "
        "transformer.wte.weight."
    ]
    built = build("own", text)
    trained = published.transformer.h[1].mlp.c_fc.weight
    assert torch.equal(built.transformer.h[1].mlp.c_fc.weight, trained)
    assert torch.equal(built.transformer.wpe.weight, published.transformer.wpe.weight)
    (table, *_) = build("t5", text).transformer.positions.parameters()
    assert not table.any(), "beside trained weights a table starts as nothing"
    before = build.described()
    with torch.no_grad():
        trained += 1
    published.save_pretrained(tmp_path)
    assert build.described() != before


def test_a_model_that_sees_later_bytes_is_refused(tmp_path: Path, text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, given = TEXTS["bert"]
    build = LibraryModel(saved(tmp_path, config, **given))
    bert = imported("transformers.models.bert.modeling_bert")
    kept = bert.BertSelfAttention.__init__

    def sees_all(self: Any, *arguments: Any, **options: Any) -> None:
        kept(self, *arguments, **options)
        self.is_causal = False

    monkeypatch.setattr(bert, "create_causal_mask", bert.create_bidirectional_mask)
    monkeypatch.setattr(bert.BertSelfAttention, "__init__", sees_all)
    with pytest.raises(ValueError, match=r"expected a causal model of text; got hf:.*, which sees later"):
        build("own", text)


@pytest.fixture
def _unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0 where nobody reads them: random numbers take most of building the smallest Swin that timm names."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, *_, **__: self.zero_())


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder with configurations of T5 and GPT-2, one of a model that nobody knows, and one that is no JSON."""
    saved(tmp_path / "t5", "T5Config", d_model=32, num_layers=1, num_heads=2)
    saved(tmp_path / "gpt2", TEXTS["gpt2"][0], **TEXTS["gpt2"][1])
    for name, written in (("strange", json.dumps({"model_type": "abacus"})), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(written)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "position", "data", "says"),
    [
        ("timm:resnet18", "own", "digits", r"a model whose attention can be found; got ResNet\."),
        ("timm:mixer_s16_224", "own", "digits", r"whose attention can be found; got MlpMixer\."),
        (VIT, "own", "text", rf"expected images for {VIT}; got the data text\."),
        (VIT, "rotary_9", "digits", r"expected a position mechanism|the name of a position"),
        (SWIN, "learned", "digits", r"a position that acts in attention"),
        ("t5", "own", "text", r"that continues a text; got hf:.*, a t5, which maps .* Pass datasets"),
        ("gpt2", "own", "pairs", r"images or a text file for hf:.*; got datasets of another"),
        ("gpt2", "own", "digits", r"a model for images, as AutoModelForImage.*; got hf:.*, a gpt2\."),
        ("gpt2", "relative_2d", "text", r"which have 1; got 'relative_2d', which is for 2 or 3\."),
        ("strange", "own", "text", r"a model_type that transformers knows .*; got 'abacus'\."),
        ("broken", "own", "text", r"expected JSON in .*config\.json; got "),
        ("timm:", "own", "text", r"expected timm:NAME, torchvision:NAME or hf:FOLDER; got 'timm:'\."),
        ("torchvision:vit_b_61", "own", "digits", r"of a model of torchvision; got 'vit_b_61'\. Did you mean vit_b_16"),
        ("torchvision:resnet18", "own", "digits", r"a model whose attention can be found; got ResNet\."),
        ("torchvision:maxvit_t", "own", "digits", r"an image size for maxvit_t .* Its windows of 7 x 7 need multiples"),
        ("torchvision:swin_t", "own", "text", r"expected images for torchvision:swin_t; got the data text\."),
    ],
)
@pytest.mark.usefixtures("_unfilled")
def test_mistakes_are_one_line(name: str, position: str, data: str, says: str, folders: Path) -> None:
    pairs = tuple((torch.arange(24).view(2, 12), torch.arange(24).view(2, 12)) for _ in range(3))
    task = find_data(pairs) if data == "pairs" else find_task(data)
    with pytest.raises(ValueError, match=says) as caught:
        LibraryModel(name if ":" in name else f"hf:{folders / name}")(position, task)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_a_comparison_inside_a_text_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds: records hold their figures, trained models come back, and the page has the command.

    As many processes as one seed takes with memory measured, which a model of timm below has.
    """
    monkeypatch.setattr("relpos.comparison.cost.memory_sizes", lambda *_: ())
    text = tmp_path / "mine.txt"
    text.write_text("to be or not to be, that is the question " * 1400)
    name = saved(tmp_path / "gpt2", TEXTS["gpt2"][0], **TEXTS["gpt2"][1])
    lines: list[str] = []
    result = relpos.compare(
        name, text, ["own", "rotary_1d"], seeds=2, steps=1, quick=True, lr=1e-3, device="cpu", out=tmp_path / "out",
        recipe={"position_learning_rate_multiplier": 1}, display=relpos.comparison.display.Display(lines.append),
    )  # fmt: skip
    assert f"{name} at the size of the data, with random weights." in lines
    runs = {position: result.results.runs(position) for position in ("own", "rotary_1d")}
    for position, count in (("own", 256 * 32), ("rotary_1d", 0)):
        assert [run.seed for run in runs[position]] == [0, 1]
        assert [run.parameters.position for run in runs[position]] == [count, count]
        assert [[metric.probe for metric in run.metrics] for run in runs[position]] == [["test"]] * 2
        first, second = (run.curve.loss for run in runs[position])
        assert first != second, "another start and other batches"
    assert result.results.mechanisms[0].summary == "Absolute embedding of 256 positions (transformer.wpe)."
    page = result.page.read_text(encoding="utf-8")
    assert f"--model {name} --positions own,rotary_1d --seeds 2" in page
    assert "What was learned" not in page
    task = find_data(text)
    inputs, _ = next(task.batches(1, 0))
    zero, one = (scores(result.models["rotary_1d", seed], inputs) for seed in (0, 1))
    assert zero.shape == one.shape == (1, 256, 256)
    assert not torch.equal(zero, one)


@pytest.mark.usefixtures("_unfilled")
@pytest.mark.slow
def test_of_a_list_what_the_model_cannot_take_is_left_out_and_said() -> None:
    from relpos.comparison.entry import _suited

    procedure, task, named = Procedure(LibraryModel(SWIN)), find_task("digits"), CompareRequest(positions=("t5",))
    request, said = _suited(CompareRequest(), task, procedure)
    names = request.positions
    assert names is not None
    assert names[0] == "own"
    assert "learned" not in names
    assert "relative_2d" in names
    left_out = [line for line in said if line.startswith("Left out")]
    assert left_out[0].startswith("Left out learned: expected a position that acts in attention")
    request, said = _suited(named, task, procedure)
    assert request == named
    assert not any(line.startswith("Left out") for line in said)


def test_trained_images_keep_their_size_and_position(tmp_path: Path) -> None:
    """At another size the position embedding would not fit, and start anew."""
    from relpos.comparison.entry import _LEAST_PATCHES, _sizes

    sizes = {"image_size": 48, "patch_size": 4}
    transformers = imported("transformers")
    plain = LibraryModel(saved(tmp_path / "plain", "ViTConfig", **SMALL, **sizes))
    published = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **sizes))
    published.save_pretrained(tmp_path / "trained")
    build, photos = LibraryModel(f"hf:{tmp_path / 'trained'}"), tmp_path / "photos"
    for number in range(60):
        file = photos / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(file)
    assert _sizes(plain, photos, None, _LEAST_PATCHES) == ((64, 64), (4, 4))
    assert _sizes(build, photos, 32, _LEAST_PATCHES) == (32, (4, 4))
    size, patch = _sizes(build, photos, None, _LEAST_PATCHES)
    task = find_data(photos, image_size=size, patch=patch)
    (said,) = build.notes(task)
    assert "position" not in said
    kept = build("own", task).vit.embeddings.position_embeddings
    assert torch.equal(kept, published.vit.embeddings.position_embeddings)


@pytest.mark.slow
def test_few_tokens_are_said(tmp_path: Path) -> None:
    images = [(torch.rand(3, 32, 32), number % 2) for number in range(8)]
    for patch, wanted in (
        (None, ["Only 4 tokens: images of 32 x 32 in patches of 16 x 16. Pass a smaller patch or larger images."]),
        (8, []),
    ):
        lines: list[str] = []
        relpos.compare(
            VIT, (images, images, images), ["none"], patch=patch, steps=1, quick=True, device="cpu",
            out=tmp_path / str(patch), display=relpos.comparison.display.Display(lines.append),
        )  # fmt: skip
        assert [line for line in lines if "tokens:" in line] == wanted
