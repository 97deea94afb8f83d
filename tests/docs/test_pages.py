"""Pages that are made or that list what is there: they say what their scripts write, and leave nothing out."""

from pathlib import Path

import pytest
from guides import blocks

from loaded import Loaded
from relpos.adapters.common.kinds import refused_classes, replaced_classes
from relpos.adapters.replacements.finding import FAMILIES

ROOT = Path(__file__).parents[2]
REPLACE = ROOT / "docs" / "replace.md"
EXAMPLES = list(blocks(REPLACE))


@pytest.mark.parametrize("script", ["scale_page", pytest.param("retrofit_page", marks=pytest.mark.slow)])
def test_a_page_is_what_its_script_writes(script: str, loaded: Loaded) -> None:
    """docs/scale.md has the figures that benchmarks measured, and no others; docs/retrofit.md its table of classes."""
    needs = ["models"] if script == "retrofit_page" else []
    done = loaded.run(ROOT / "scripts" / script, "--check", needs=needs)
    assert done.returncode == 0, done.stderr


def test_the_page_of_retrofit_has_a_row_for_every_class() -> None:
    page = (ROOT / "docs" / "retrofit.md").read_text("utf-8")
    for path in (*replaced_classes(), *refused_classes()):
        assert f"`{path.rpartition('.')[2]}`" in page, path


def test_the_page_of_replace_has_examples() -> None:
    assert len(EXAMPLES) == 8
    assert sum(bool(printed) for _, _, printed in EXAMPLES) == 4


@pytest.mark.usefixtures("timm")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("line", "code", "printed"), EXAMPLES)
def test_examples_of_replace_print_what_stands_there(
    line: int, code: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, f"docs/replace.md:{line}", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_table_of_replace_has_every_family() -> None:
    table = REPLACE.read_text("utf-8").split("## What is served")[1].split("\n\n")[1]
    words = {"vit": "ViT", "torch_attention": "nn.MultiheadAttention", "beit": "BEiT", "swin": "Swin", "bert": "BERT"}
    words |= {
        "gpt2": "GPT-2",
        "llama": "Llama",
        "t5": "T5",
        "torchvision_vit": "torchvision",
        "torchvision_windows": "Swin3D",
        "torchvision_mvit": "MViT",
    }
    assert words.keys() == set(FAMILIES)
    assert not [word for word in words.values() if word not in table]
