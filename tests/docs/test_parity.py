"""docs/parity.md: made by a run of the tests, with a row for every mechanism and for the code it must agree with."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import parity
import relpos
from relpos.position import presets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
AGAIN = "run: python -m pytest tests/position --parity docs/parity.md"

PUBLISHED = {
    "alibi": ("transformers BloomAttention", "transformers MptAttention"),
    "clipped": ("worked example of 7 x 7",),
    "deberta": ("transformers DebertaV2 DisentangledSelfAttention",),
    "decomposed": (
        "transformers SamVisionAttention",
        "transformers SamVisionSdpaAttention",
        "transformers SAM get_decomposed_rel_pos",
        "timm MViTv2 MultiScaleAttention",
    ),
    "learned": ("timm VisionTransformer", "timm resample_abs_pos_embed"),
    "log_cpb": ("transformers Swinv2SelfAttention",),
    "relative_2d": (
        "timm BEiT Attention",
        "timm Swin WindowAttention",
        "timm resize_rel_pos_bias_table_simple",
        "timm resize_rel_pos_bias_table, geometric",
        "torchvision ShiftedWindowAttention3d",
    ),
    "rotary_1d": (
        "transformers GPTJAttention",
        "transformers GPTNeoXAttention",
        "transformers LlamaAttention",
        "transformers RoFormerSelfAttention",
    ),
    "rotary_2d": ("timm EvaAttention", "timm RotaryEmbeddingCat"),
    "rotary_dinov3": ("timm RotaryEmbeddingDinoV3", "transformers DINOv3ViTAttention"),
    "rotary_mixed": ("timm RotaryEmbeddingMixed",),
    "rotary_multimodal": ("transformers Qwen2VLAttention", "transformers Qwen3VLTextAttention"),
    **{
        f"rotary_{scaling}": ("transformers LlamaAttention",)
        for scaling in ("linear", "ntk", "yarn", "llama3", "dynamic_ntk")
    },
    "sandwich": ("Chi et al. 2023, the code of the appendix",),
    "shaw": (
        "Huang et al. 2018 (Music Transformer), the skew",
        "Shaw et al. 2018, equations 3 to 5",
        "transformers Wav2Vec2BertSelfAttention",
    ),
    "sinusoidal_1d": (
        "transformers MarianSinusoidalPositionalEmbedding",
        "transformers Speech2TextSinusoidalPositionalEmbedding",
    ),
    "sinusoidal_2d": ("timm build_sincos2d_pos_embed",),
    "t5": ("transformers T5Attention",),
    "transformer_xl": ("transformers Wav2Vec2ConformerSelfAttention", "transformers XLNetRelativeAttention"),
}
"""Whose code a mechanism, or a variant of it, is compared with."""


def rows(text: str) -> list[dict[str, str]]:
    """The table's rows, by column."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    head, rule, *body = [[cell.strip() for cell in line] for line in lines]
    assert head == parity.COLUMNS
    assert set(rule) == {"---"}
    return [dict(zip(head, row, strict=True)) for row in body]


@pytest.fixture(scope="module")
def page() -> str:
    assert PAGE.is_file(), AGAIN
    return PAGE.read_text(encoding="utf-8")


def preset(name: str) -> str:
    """The mechanism of a row, whose name is a preset's, or that and the variant in brackets."""
    return name.partition(" (")[0]


def test_it_was_made_by_a_run(page: str) -> None:
    assert page.startswith(parity.HEAD), AGAIN
    after = page.removeprefix(parity.HEAD).splitlines()
    assert re.fullmatch(r"Compared with torch [\d.]+\S*, transformers [\d.]+, timm [\d.]+\.", after[0])
    assert not after[1]
    assert all(line.startswith("|") for line in after[2:])


def test_every_mechanism_has_its_row(page: str) -> None:
    """By loops, in both dtypes. A sum may leave that to its parts, and `none` has nothing to compare."""
    by_loops = {row["mechanism"]: row for row in rows(page) if row["oracle"] == "loops"}
    for name in presets():
        names = [name] if name in by_loops or "+" not in name else name.split("+")
        for part in names:
            assert part in by_loops or part == "none", f"{part} is missing; {AGAIN}"
            assert part == "none" or all(by_loops[part][column] for column in parity.COLUMNS[2:7]), part


def test_every_row_is_of_a_mechanism(page: str) -> None:
    for row in rows(page):
        name = row["mechanism"]
        known = preset(name) in presets() or "+" in name or hasattr(relpos, name.partition(".")[0])
        assert known, f"{name} is no preset, no variant of one in brackets and no class of relpos"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_code_is_there(page: str, name: str) -> None:
    assert name in presets()
    found = {row["oracle"] for row in rows(page) if preset(row["mechanism"]) == name}
    assert set(PUBLISHED[name]) <= found, f"{sorted(set(PUBLISHED[name]) - found)} is missing; {AGAIN}"


def test_every_figure_is_small_or_has_its_reason(page: str) -> None:
    for row in rows(page):
        for column in parity.COLUMNS[2:6]:
            limit = parity.LIMITS[torch.float64 if "float64" in column else torch.float32]
            if row[column]:
                assert float(row[column]) <= limit or row["why no closer"], (row["mechanism"], row["oracle"], column)


# how it is made


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """A run of its own, beside the one under way."""
    found: dict[Any, Any] = {}
    monkeypatch.setattr(parity, "ROWS", found)
    return found


def test_a_row_keeps_the_worst(noted: dict[Any, Any], tmp_path: Path) -> None:
    one = torch.tensor([4.0, -8.0], dtype=torch.float64)
    for step in (2e-12, 1e-12):
        parity.agree("t5", "theirs", {"output": one + 8 * step, "x": one}, {"output": one, "x": one})
    parity.agree("t5", "theirs", {"output": one.float()}, {"output": one.float()}, limit=1e-3, why="it is wide")
    parity.write(tmp_path / "made.md", ["torch 1", "transformers 2", "timm 3"])
    (row,) = rows((tmp_path / "made.md").read_text(encoding="utf-8"))
    assert list(row.values()) == ["t5", "theirs", "2.0e-12", "0", "0", "", "1", "it is wide"]
    test_it_was_made_by_a_run((tmp_path / "made.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("ours", "what"),
    [
        ({"output": [1.0, -2.0], "x": [1.0, 1.0]}, "gradient differs by 2"),
        ({"output": [1.0, -2.1], "x": [1.0, -1.0]}, "output differs by 0.05"),
        ({"output": [1.0, float("nan")], "x": [1.0, -1.0]}, "output: NaN"),
        ({"output": [1.0], "x": [1.0, -1.0]}, "output: "),
        ({"output": [1.0, -2.0]}, "'output', 'x'"),
    ],
)
def test_what_differs_is_refused(noted: dict[Any, Any], ours: dict[str, list[float]], what: str) -> None:
    theirs = {"output": torch.tensor([1.0, -2.0]), "x": torch.tensor([1.0, -1.0])}
    with pytest.raises(AssertionError, match=what):
        parity.agree("t5", "theirs", {name: torch.tensor(x) for name, x in ours.items()}, theirs)


def test_what_cancels_is_held_against_the_largest_gradient(noted: dict[Any, Any]) -> None:
    theirs = {"output": torch.ones(2), "x": torch.full((2,), 1e-7), "y": torch.ones(2)}
    parity.agree("t5", "theirs", theirs | {"x": torch.zeros(2)}, theirs)
    assert noted["t5", "theirs"][torch.float32].gradient == pytest.approx(1e-7)
    with pytest.raises(AssertionError, match="gradient differs by 1"):
        parity.agree("t5", "theirs", theirs | {"x": torch.ones(2)}, theirs)


def test_layers_grow_from_the_same_or_from_named_others(noted: dict[Any, Any]) -> None:
    x, table = torch.randn(2, 3, dtype=torch.float64).requires_grad_(), torch.randn(3).double().requires_grad_()
    own = table.detach().clone().requires_grad_()
    leaves = {"x": x, "table": table}
    parity.layers_agree("t5", "theirs", x * own, table * x, leaves, {"table": own})
    assert noted["t5", "theirs"][torch.float64].compared == {"output", "x", "table"}
    for wrong, other in ((x * own.detach(), {"table": own}), (x.detach() * own, {"table": own}), (x * own, {})):
        with pytest.raises(AssertionError, match="gradient differs by"):
            parity.layers_agree("t5", "theirs", wrong, table * x, leaves, other)
    with pytest.raises(AssertionError, match="biases"):
        parity.layers_agree("t5", "theirs", x * own, table * x, leaves, {"biases": own})
