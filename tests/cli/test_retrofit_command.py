"""`relpos retrofit`: what it prints."""

from pathlib import Path

import pytest

from relpos.adapters.common.libraries import imported
from relpos.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("timm")]


@pytest.mark.parametrize("weights", [False, True])
def test_it_verifies_and_times_a_model_of_a_folder(
    weights: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = imported("transformers")
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    (transformers.T5Model(config) if weights else config).save_pretrained(tmp_path)
    capsys.readouterr()
    typed = "--lengths 16 --forward" if weights else "--lengths 32,16 --border 0"
    main(["retrofit", f"hf:{tmp_path}", "--rounds", "1", *typed.split()])
    printed = capsys.readouterr().out
    assert "T5Model (transformers" in printed
    assert "replaced  T5Attention x 3" in printed
    assert "verified  T5Attention" in printed
    if weights:
        assert "Forward pass without gradients" in printed
        return
    assert "Training step" in printed
    assert printed.index(" 16 ") < printed.index(" 32 ")
    assert "MiB is the peak memory of a step" in " ".join(printed.split())
