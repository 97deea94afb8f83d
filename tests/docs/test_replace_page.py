"""docs/replace.md: its examples run and print what stands there, and its table has every family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relpos.adapters.replacement.finding import FAMILIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "replace.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == 6
    assert sum(bool(printed) for _, printed in EXAMPLES) == 3


@pytest.mark.usefixtures("timm")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_print_what_stands_there(code: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "docs/replace.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_has_every_family() -> None:
    table = PAGE.split("## What is served")[1].split("\n\n")[1]
    words = {"vit": "ViT", "torch_attention": "nn.MultiheadAttention", "beit": "BEiT", "swin": "Swin", "bert": "BERT"}
    words |= {"gpt2": "GPT-2", "llama": "Llama", "t5": "T5"}
    assert words.keys() == set(FAMILIES)
    for family in FAMILIES:
        assert words[family] in table
