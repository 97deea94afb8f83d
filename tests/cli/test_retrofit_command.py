"""`relpos retrofit`: what it prints."""

from pathlib import Path

import pytest

from relpos.adapters.common.libraries import imported
from relpos.bench.retrofits import RetrofitTiming
from relpos.cli import main, retrofit_verb

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
    assert "Forward pass without gradients" in printed
    assert ("Training step" in printed) == (not weights)
    assert "MiB is the peak memory of a step" in printed
    if weights:
        assert "On this CPU, float32, batch 1, relpos is at least as fast: inferring, " in printed
        return
    assert "On this CPU, float32, batch 1, the retrofit is " in printed
    assert printed.index(" 16 ") < printed.index(" 32 ")


@pytest.mark.parametrize(
    ("training", "inferring", "said"),
    [
        ((0.5, 1.1, 1.3), (1.2, 1.1, 2.0), "from 256 tokens on; inferring, from 128 tokens on, of what was timed. Pass "
         "relpos.retrofit(model, border=256)."),
        ((1.5, 0.9, 1.0), (1.2, 1.1, 0.9), "from 512 tokens on; inferring, never, of what was timed. Leave the model"),
    ],
)  # fmt: skip
def test_it_says_which_border_the_times_give(
    training: tuple[float, ...], inferring: tuple[float, ...], said: str
) -> None:
    """A length at which relpos is slower hides the shorter ones."""
    found = {
        train: [
            RetrofitTiming(length, ratio, 1.0, ratio, 0.0, 0.0, length // 10)
            for length, ratio in zip((1280, 2560, 5120), ratios, strict=True)
        ]
        for train, ratios in ((True, training), (False, inferring))
    }
    assert said in retrofit_verb._border_in_words(found)
