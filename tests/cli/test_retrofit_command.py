"""`relpos retrofit`: what it prints, and one line for what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from relpos.adapters.libraries import imported
from relpos.cli import main

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("timm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the configuration of a small T5."""
    transformers = imported("transformers")
    transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4).save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.mark.slow
def test_it_verifies_and_times_both(folder: Path, capsys: Captured) -> None:
    main(["retrofit", f"hf:{folder}", "--lengths", "32,16", "--rounds", "1", "--border", "0"])
    printed = capsys.readouterr().out
    assert "T5Model (transformers" in printed
    assert "replaced  T5Attention x 3" in printed
    assert "verified  T5Attention" in printed
    assert "Training step" in printed
    assert printed.index(" 16 ") < printed.index(" 32 ")
    assert "MiB is the peak of a step" in printed


@pytest.mark.slow
def test_weights_of_a_folder_are_read(folder: Path, capsys: Captured) -> None:
    transformers = imported("transformers")
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    main(["retrofit", f"hf:{folder}", "--lengths", "16", "--rounds", "1", "--forward"])
    assert "Forward pass without gradients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["resnet"], "expected hf:FOLDER or timm:NAME; got 'resnet'"),
        (["hf:nowhere"], "expected a folder with config.json after hf:; got nowhere"),
        (["timm:beit_bas_patch16_224"], "Did you mean beit_base_patch16_224"),
        (["timm:vit_tiny_patch16_224"], "got VisionTransformer, which has none that is known"),
        (["timm:x", "--lengths", "a"], "expected --lengths from 2 to 1,048,576, joined by commas; got 'a'"),
        (["timm:x", "--train", "--forward"], "expected one of --train and --forward; got both"),
    ],
)
def test_what_it_cannot_do_is_one_line(typed: list[str], said: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["retrofit", *typed])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert error.count("\n") == 1
