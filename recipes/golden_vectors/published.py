"""What transformers and timm compute: the integers of the file, and float32 to compare its real numbers with."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

_KEPT: list[torch.library.Library] = []
try:
    importlib.import_module("torchvision")
except ImportError:
    pass
except RuntimeError:  # a CUDA build beside a CPU build of torch, which lacks two operators that are not used here
    for operator in ("nms", "qnms"):
        _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        _KEPT[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm.layers  # noqa: E402
from transformers import DINOv3ViTConfig, LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.beit.modeling_beit import BeitRelativePositionBias  # noqa: E402
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes  # noqa: E402
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave  # noqa: E402
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding  # noqa: E402
from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb as apply_dinov3  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding  # noqa: E402
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding  # noqa: E402
from transformers.models.swin.modeling_swin import SwinRelativePositionBias  # noqa: E402
from transformers.models.t5.modeling_t5 import T5Attention  # noqa: E402

Case = dict[str, Any]


def source_of(what: Any) -> str:
    """Where published code stands: library, version, file and name."""
    module = inspect.getmodule(what).__name__  # type: ignore[union-attr]
    library, _, path = module.partition(".")
    return f"{library} {version(library)}, {path.replace('.', '/')}.py, {what.__qualname__}"


def rope_source(kind: str) -> str:
    """Where a scaling of transformers stands."""
    return source_of(ROPE_INIT_FUNCTIONS[kind])


DEEPSEEK, QWEN2_VL = source_of(apply_rotary_pos_emb_interleave), source_of(Qwen2VLRotaryEmbedding)
QWEN3_VL = source_of(Qwen3VLTextRotaryEmbedding)
T5, SLOPES = source_of(T5Attention._relative_position_bucket), source_of(_get_alibi_slopes)
DINOV3, TIMM_GRID = source_of(DINOv3ViTRopePositionEmbedding), source_of(timm.layers.RotaryEmbeddingCat)


def require_close(name: str, found: torch.Tensor, own: Any, relative: float = 3e-6) -> None:
    """Stop unless published numbers in float32 are those of the file."""
    expected = torch.tensor(_floats(own), dtype=torch.float64)
    torch.testing.assert_close(
        found.double(), expected, rtol=relative, atol=1e-6, msg=lambda why: f"{name} is not as published: {why}"
    )


def _floats(tree: Any) -> Any:
    return [_floats(one) for one in tree] if isinstance(tree, list | tuple) else float(tree)


KEYS = {"trained_length": "original_max_position_embeddings"}
"""Names of transformers' settings where the file has others."""


def check_scaling(kind: str, case: Case) -> None:
    """Compare frequencies, magnitude and output with transformers', which computes in float32."""
    own = case["parameters"]
    rope = {KEYS.get(name, name): value for name, value in own.items() if name not in ("base", "length", "head_dim")}
    longest = own.get("trained_length", 1) * own.get("factor", 1)
    if kind == "dynamic":  # its trained length is the longest
        longest = rope.pop("original_max_position_embeddings")
    config = LlamaConfig(
        hidden_size=own["head_dim"],
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, "rope_theta": float(own["base"]), **rope},
    )
    bands, magnitude = ROPE_INIT_FUNCTIONS[kind](config, seq_len=own.get("length"))
    require_close(case["name"], bands, case["frequencies"])
    require_close(case["name"], torch.tensor(float(magnitude)), case["magnitude"])
    require_output(case, apply_rotary_pos_emb_interleave if case["layout"] == "interleaved" else apply_rotary_pos_emb)


def require_output(case: Case, rotate: Any = apply_rotary_pos_emb) -> None:
    """Compare the output with that of published code that gets the file's angles, in float64."""
    x = torch.tensor(_floats(case["input"]), dtype=torch.float64)
    angles = torch.tensor(_floats(case["angles"]), dtype=torch.float64).repeat(1, 2)
    factor = float(case["magnitude"])
    x = x.expand(1, 1, len(angles), -1)
    found = rotate(x, x, factor * angles.cos()[None], factor * angles.sin()[None])[0][0, 0]
    require_close(case["name"], found, case["output"])


def check_multimodal(case: Case) -> None:
    """Compare M-RoPE with Qwen2-VL, or interleaved with Qwen3-VL."""
    own = case["parameters"]
    rope = {"rope_type": "default", "rope_theta": float(own["base"]), "mrope_section": own["sections"]}
    kind, rotary = {
        "blocked": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding),
        "interleaved": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
    }[own["order"]]
    config = kind(hidden_size=own["head_dim"], num_attention_heads=1, head_dim=own["head_dim"], rope_parameters=rope)
    x = torch.tensor(_floats(case["input"])).expand(1, 1, len(case["positions"]), -1)
    places = torch.tensor(case["positions"]).T[:, None]
    found = apply_rotary_pos_emb(x, x, *rotary(config)(x, places))[0][0, 0]
    require_close(case["name"], found, case["output"])


def check_grid(case: Case) -> None:
    """Compare the axial rotation of a grid with timm's."""
    own = case["parameters"]
    module = timm.layers.RotaryEmbeddingCat(own["head_dim"], in_pixels=False, temperature=float(own["base"]))
    x = torch.tensor(_floats(case["input"])).expand(1, 1, len(case["positions"]), -1)
    found = timm.layers.apply_rot_embed_cat(x, module.get_embed(own["grid"]))[0, 0]
    require_close(case["name"], found, case["output"])


def check_dinov3(case: Case) -> None:
    """Compare DINOv3's rotation with transformers'."""
    own = case["parameters"]
    sizes = {"hidden_size": own["head_dim"], "num_attention_heads": 1, "patch_size": 1}
    rotary = DINOv3ViTRopePositionEmbedding(DINOv3ViTConfig(**sizes, rope_theta=float(own["base"]))).eval()
    x = torch.tensor(_floats(case["input"])).expand(1, 1, len(case["positions"]), -1)
    waves = rotary(torch.zeros(1, 1, *own["grid"]))
    found = apply_dinov3(x, x, *waves)[0][0, 0]
    require_close(case["name"], found, case["output"])


def check_slopes(heads: int, slopes: Sequence[Any]) -> None:
    """Compare slopes with BLOOM's."""
    require_close(f"alibi_{heads}", _get_alibi_slopes(heads, torch.device("cpu")), slopes)


def t5_buckets(offsets: Sequence[int], **settings: Any) -> list[int]:
    """T5's buckets of query - key; T5 takes key - query."""
    found: list[int] = T5Attention._relative_position_bucket(-torch.tensor(offsets), **settings).tolist()
    return found


def table_index(name: str, window: Sequence[int]) -> tuple[str, int, list[list[int]]]:
    """The source, the number of rows of the table, and the row of each pair of tokens; of BEiT class token first."""
    rows = (2 * window[0] - 1) * (2 * window[1] - 1)
    if name == "beit":
        index = BeitRelativePositionBias.generate_relative_position_index(tuple(window))
        own = timm.layers.pos_embed_rel.gen_relative_position_index(tuple(window), class_token=True)
        paper, where, rows = (
            "Bao et al. 2022 (BEiT)",
            BeitRelativePositionBias.generate_relative_position_index,
            rows + 3,
        )
    else:
        index = SwinRelativePositionBias(1, tuple(window)).relative_position_index.view(window[0] * window[1], -1)
        own = timm.layers.pos_embed_rel.gen_relative_position_index(tuple(window))
        paper, where = "Liu et al. 2021 (Swin), section 3.2", SwinRelativePositionBias._create_relative_position_index
    if not torch.equal(index, own):
        raise SystemExit(f"transformers and timm differ in {name}")
    return f"{paper}; {source_of(where)}, and timm {version('timm')}", rows, index.tolist()
