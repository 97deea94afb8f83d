"""Models as folders: what is saved comes back, nothing is overwritten, and a hub gets the same files."""

import errno
import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from relpos import LanguageModel, SwinTransformer, VisionTransformer
from relpos.files.writing import WriteError
from relpos.models import RotaryChoice
from relpos.models.pretrained import PretrainedModel

VIT: dict[str, Any] = {"img_size": (8, 12), "patch_size": 2, "in_chans": 1, "num_classes": 3, "embed_dim": 16,
                       "depth": 2, "num_heads": 2}  # fmt: skip
LM: dict[str, Any] = {"vocab_size": 9, "context": 12, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN: dict[str, Any] = {"img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 3, "embed_dim": 8,
                        "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}  # fmt: skip
MODELS = {
    "vit": lambda: VisionTransformer(**VIT),
    "deit 3": lambda: VisionTransformer(**VIT, init_values=0.1, norm_eps=1e-6, distilled=True, shared_position=True),
    "vit without any position": lambda: VisionTransformer(**VIT, position=None, class_token=False, global_pool="avg"),
    "vit, two positions, grown": lambda: VisionTransformer(
        **VIT, position="learned+relative_2d", position_init_std=0.5
    ).grow((16, 12), "interpolated"),
    "language": lambda: LanguageModel(**LM, num_kv_heads=1, tie_embeddings=False, mlp_hidden=20, embed_scale=2.0),
    "language, grown twice": lambda: LanguageModel(**LM).grow(24, "yarn").grow(48, "linear"),
    "language, another base": lambda: LanguageModel(
        **LM, position=RotaryChoice(5e5, relpos.Llama3Scaling(4.0, 16, 1.0, 3.0))
    ),
    "language, long rope": lambda: LanguageModel(
        **LM, position=RotaryChoice(1e4, relpos.LongRoPE((1.0,) * 4, (2.0,) * 4, 16, 4.0))
    ),
    "swin": lambda: SwinTransformer(**SWIN, position_init_std=0.5),
    "swin 2, grown": lambda: SwinTransformer(**SWIN, version=2).grow((32, 16), "as is", window_size=(8, 4)),
}  # fmt: skip


def said(model: PretrainedModel) -> Tensor:
    torch.manual_seed(3)
    if isinstance(model, LanguageModel):
        return model(torch.randint(9, (2, model.context)))  # type: ignore[no-any-return]
    size = tuple(2 * side for side in model.patch_embed.grid_size)  # type: ignore[union-attr, operator]
    return model(torch.randn(2, 1, *size))  # type: ignore[no-any-return]


def awake(name: str) -> PretrainedModel:
    model: PretrainedModel = MODELS[name]()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back(name: str, tmp_path: Path) -> None:
    model = awake(name)
    model.save_pretrained(tmp_path / "deep" / "m")
    again = type(model).from_pretrained(str(tmp_path / "deep" / "m"))
    assert torch.equal(said(again), said(model))
    assert not again.training
    assert again.arguments == model.arguments
    assert again.grown == model.grown
    files = {path.name for path in (tmp_path / "deep" / "m").iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md"}
    again.save_pretrained(tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "deep" / "m" / file).read_bytes()


def test_defaults_are_written_down(tmp_path: Path) -> None:
    """So that a version with other defaults builds the same model."""
    VisionTransformer(**VIT).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["class"] == "VisionTransformer"
    assert config["relpos"] == relpos.__version__
    assert config["position"] == "learned"
    assert config["model"]["mlp_ratio"] == 4.0
    assert config["model"]["norm_eps"] is None
    assert config["model"]["img_size"] == [8, 12]
    assert "position" not in config["model"]


def test_the_card_says_how_to_load_it(tmp_path: Path) -> None:
    model = LanguageModel(**LM)
    model.save_pretrained(tmp_path / "words")
    card = (tmp_path / "words" / "README.md").read_text()
    count = sum(x.numel() for x in model.parameters())
    assert card.startswith("---\nlibrary_name: relpos\n")
    assert f"A `relpos.LanguageModel` with {count:,} parameters" in card
    assert "relpos.LanguageModel.from_pretrained('words')" in card
    assert "| `context` | `12` |" in card
    assert "not recorded" in card


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    VisionTransformer(**VIT).save_pretrained(tmp_path, card="# Mine\n")
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md"])
def test_nothing_is_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"expected a folder without a {name}; got .*nothing is overwritten"):
        VisionTransformer(**VIT).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_all_files_or_none(after: int, raised: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def failing(number: int) -> None:
        calls.append(number)
        if len(calls) > after:
            raise raised
        real(number)

    model = VisionTransformer(**VIT)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", failing)
        context.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
            model.save_pretrained(tmp_path)
    if isinstance(caught.value, WriteError):
        assert re.match(
            r"expected .* free for .*/(config\.json|model\.safetensors|README\.md); got ", str(caught.value)
        )
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "position",
    [lambda site: relpos.T5Bias(site.num_heads), RotaryChoice(1e4, lambda base, pairs, length: ((1.0,) * pairs, 1.0))],
)
def test_a_position_without_a_name_is_not_saved(position: Any, tmp_path: Path) -> None:
    model = LanguageModel(**LM, position=position)
    with pytest.raises(
        ValueError, match=r"expected a position by name to save; got the function <lambda>\. Save model\.state"
    ):
        model.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_model_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    model = VisionTransformer(**VIT)
    model.head = torch.nn.Linear(16, 4)
    line = r"expected an unchanged VisionTransformer to save; got one that has head\.\w+ of shape \[4.* Build it"
    with pytest.raises(ValueError, match=line) as caught:
        model.save_pretrained(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m").exists()
    model = VisionTransformer(**VIT)
    model.more = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"got one that has more\.weight, has more\.bias\. Build it"):
        model.save_pretrained(tmp_path / "m")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["vit", "language", "swin"])
def test_a_dtype_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = awake(name).to(dtype)
    model.save_pretrained(tmp_path)
    again = PretrainedModel.from_pretrained(tmp_path)
    assert {x.dtype for x in again.parameters()} == {dtype}
    state = again.state_dict()
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())


def test_a_model_of_another_class(tmp_path: Path) -> None:
    VisionTransformer(**VIT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a LanguageModel; got a VisionTransformer in .*\. Use relpos\.Vis"):
        LanguageModel.from_pretrained(tmp_path)
    assert isinstance(PretrainedModel.from_pretrained(tmp_path), VisionTransformer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"class": "Module"}, r"its class is 'Module'"),
        ({"class": 3}, r"its class is int 3, not text"),
        ({"grown": 3}, r"its grown is int 3, not a list"),
        ({"grown": [{"img_size": [8, 12], "rule": "longer"}]}, r"whose model can be built; got"),
        ({"grown": [3]}, r"whose model can be built; got"),
        ({"position": {"RotaryChoice": {"base": 1e4, "scaling": {"open": {}}}}}, r"scaling to be one of"),
        ({"position": {"function": "f"}}, r"expected a position by name or a RotaryChoice"),
        ({"model": {"attention": "global"}}, r"attention to be one of .*; got str 'global'\)\. Save it again"),
        ({"model": {"mlp_ratio": "4"}}, r"mlp_ratio to be a number above 0; got str '4'\)\. Save it again"),
        ({"position": 3}, r"whose model can be built; got"),
        ({"position": {"RotaryChoice": {"base": 1e4, "scaling": {"YaRM": {"factor": 4}}}}}, r"got str 'YaRM'\)\. Save"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_a_damaged_configuration_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    VisionTransformer(**VIT).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=says) as caught:
        VisionTransformer.from_pretrained(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not re.search("Choose|Did you mean", str(caught.value)), "the file says what the weights were trained with"


# The hub


IMPOSSIBLE: dict[str, Any] = {
    "a file": lambda folder: folder / "file",
    "in a file": lambda folder: folder / "file" / "model",
    "a long name": lambda folder: str(folder / ("n" * 300)),
    "a byte 0": lambda folder: f"{folder}/a\0b",
    "links in a circle": lambda folder: folder / "circle" / "model",
    "below a device": lambda folder: Path("/dev/null/model"),
    "thousands deep": lambda folder: Path(folder, *"x" * 1900),
    "bytes": lambda folder: bytes(folder),
    "a number": lambda folder: 3,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_a_path_that_cannot_be_is_one_line(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    model, given = LanguageModel(**LM), IMPOSSIBLE[path](tmp_path)
    reading = (LanguageModel.from_pretrained, lambda where: relpos.load_weights(model, where))
    for call, kinds in ((model.save_pretrained, (ValueError, WriteError)), *((one, (ValueError,)) for one in reading)):
        with pytest.raises(kinds, match=r"\Aexpected .+; got .+\. .+\Z"):
            call(given)


class Hub(ModuleType):
    """What of huggingface_hub is called, and with what."""

    def __init__(self) -> None:
        super().__init__("huggingface_hub")
        self.made: list[Any] = []
        self.uploaded: dict[str, bytes] = {}
        self.said = ""

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.made.append((name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        assert self.made[-1][0] == repo_id
        self.uploaded = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        self.said = commit_message
        return f"https://hub/{repo_id}/commit/1"


def test_a_hub_gets_what_a_folder_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    model = awake("swin")
    assert model.push_to_hub("me/mine", message="first") == "https://hub/me/mine/commit/1"
    assert hub.made == [("me/mine", True, True)]
    assert hub.said == "first"
    for name, content in hub.uploaded.items():
        (tmp_path / name).write_bytes(content)
    assert torch.equal(said(SwinTransformer.from_pretrained(tmp_path)), said(model))
    assert b"relpos.SwinTransformer.from_pretrained('me/mine')" in hub.uploaded["README.md"]


def test_without_the_hubs_library_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"expected huggingface_hub, importable; got .*pip install huggingface_hub"):
        VisionTransformer(**VIT).push_to_hub("me/mine")


def test_the_calls_are_those_of_the_library() -> None:
    """The mock takes what huggingface_hub takes."""
    hub = pytest.importorskip("huggingface_hub")
    for name, given in (
        ("create_repo", ("private", "exist_ok")),
        ("upload_folder", ("repo_id", "folder_path", "commit_message")),
    ):
        assert set(given) <= set(inspect.signature(getattr(hub, name)).parameters)
