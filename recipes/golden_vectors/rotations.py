"""Cases of rotations, by mpmath from the formulas of the papers."""

from __future__ import annotations

from typing import Any

import published
from formulas import HALF, INTERLEAVED, Case, larger, llama3, magnitude_of, plain, rotation, yarn
from mpmath import log, mpf, sqrt
from mpmath import pi as PI


def rotations() -> list[Case]:
    """RoPE and its scalings on sequences."""
    made, su, peng = [], "Su et al. 2021 (RoFormer), section 3.2", "Peng et al. 2023 (YaRN)"
    for layout in (HALF, INTERLEAVED):
        name, own = f"rope_{layout}", {"base": 10000}
        made.append(rotation(name, su, own, plain(4, 10000), head_dim=8, layout=layout))
    made.append(
        rotation(
            "rope_partial",
            f"{su}; the first rotary_dim dimensions alone, as in GPT-NeoX (Black et al. 2022), section 2.1",
            {"base": 10000, "rotary_dim": 6},
            plain(3, 10000),
            head_dim=12,
        )
    )

    def scaled(name: str, kind: str, paper: str, own: Case, bands: list[mpf], base: int = 10000, **more: Any) -> None:
        """A case of a scaling, compared with transformers' of this kind."""
        source = f"{paper}; {published.rope_source(kind)}" if kind else paper
        case = rotation(f"rope_{name}", source, {"base": base, **own}, bands, head_dim=2 * len(bands), **more)
        if kind:
            published.check_scaling(kind, case)
        made.append(case)

    scaled("linear", "linear", "Chen et al. 2023, section 2", {"factor": 4}, [w / 4 for w in plain(8, 10000)])
    scaled("ntk", "", f"bloc97 2023; {peng}, section 3.1", {"factor": 4}, plain(8, larger(10000, 8, 4)))
    for length in (1024, 6144):
        own = {"factor": 2, "trained_length": 2048, "length": length}
        by = max(1, mpf(2 * length) / 2048 - 1)
        bands = plain(8, larger(10000, 8, by))
        scaled(f"dynamic_ntk_{length}", "dynamic", "emozilla 2023", own, bands)
    own = {"factor": 4, "trained_length": 2048, "beta_fast": 32, "beta_slow": 1}
    bands, source = yarn(16, 10000, 4, 2048), f"{peng}, sections 3.2 to 3.4"
    scaled("yarn", "yarn", source, own, bands, magnitude=magnitude_of(4))
    own |= {"attention_factor": 1.25}
    scaled("yarn_attention_factor", "yarn", source, own, bands, magnitude=mpf(1.25))
    scaled(
        "deepseek_v3",
        "yarn",
        f"{source}; DeepSeek-V3's mscale and pairs: {published.DEEPSEEK}",
        {"factor": 40, "trained_length": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0.75},
        yarn(16, 10000, 40, 4096),
        layout=INTERLEAVED,
        written=HALF,
        magnitude=magnitude_of(40) / magnitude_of(40, mpf(0.75)),
    )
    short, long = [1, 1, 1.125, 1.25, 1.5, 2, 2.5, 3], [1, 1.25, 2, 4, 8, 12, 16, 20]
    for name, factors, length in (("short", short, 4096), ("long", long, 4097)):
        own = {"short_factor": short, "long_factor": long, "factor": 32, "trained_length": 4096, "length": length}
        bands = [w / mpf(one) for w, one in zip(plain(8, 10000), factors, strict=True)]
        size = sqrt(1 + log(32) / log(4096))
        scaled(f"longrope_{name}", "longrope", "Ding et al. 2024 (LongRoPE), section 3", own, bands, magnitude=size)
    own = {"factor": 8, "trained_length": 8192, "low_freq_factor": 1, "high_freq_factor": 4}
    bands = llama3(16, 500000, 8, 8192, 1, 4)
    scaled("llama3", "llama3", "Llama 3.1 (Dubey et al. 2024)", own, bands, base=500000)
    own, bands = {"partial_rotary_factor": 0.25}, plain(8, 1000000)[:2] + [mpf(0)] * 6
    scaled("proportional", "proportional", "Gemma 4 (Google 2026)", own, bands, base=1000000)
    return made


def multi_axis() -> list[Case]:
    """Rotations by several coordinates."""
    sections, pairs = [2, 3, 3], 8
    places = [(0, 0, 0), (5, 5, 5), (6, 6, 6), (6, 6, 7), (6, 7, 6), (6, 8, 9), (10, 10, 10)]
    blocked = rotation(
        "mrope_qwen2_vl",
        f"Wang et al. 2024 (Qwen2-VL), section 2.1; {published.QWEN2_VL}",
        {"base": 1000000, "sections": sections, "order": "blocked", "axes": ["time", "row", "column"]},
        plain(pairs, 1000000),
        head_dim=16,
        positions=places,
        axis=[axis for axis, size in enumerate(sections) for _ in range(size)],
    )
    published.check_multimodal(blocked)
    sections = [3, 3, 2]
    interleaved = rotation(
        "mrope_qwen3_vl",
        f"Bai et al. 2025 (Qwen3-VL), interleaved M-RoPE; {published.QWEN3_VL}",
        {"base": 1000000, "sections": sections, "order": "interleaved", "axes": ["time", "row", "column"]},
        plain(pairs, 1000000),
        head_dim=16,
        positions=places,
        axis=[p % 3 if p < 3 * sections[p % 3] else 0 for p in range(pairs)],
    )
    published.check_multimodal(interleaved)
    grid = rotation(
        "rope_2d_axial",
        f"Heo et al. 2024 (RoPE for ViT), section 3; rows first as in {published.TIMM_GRID}",
        {"base": 100, "grid": [3, 4], "axes": ["row", "column"]},
        plain(3, 100) * 2,
        head_dim=12,
        layout=INTERLEAVED,
        positions=[(row, column) for row in range(3) for column in range(4)],
        axis=[0] * 3 + [1] * 3,
    )
    published.check_grid(grid)
    rows, columns, pairs = 2, 4, 2
    fractions = rotation(
        "rope_dinov3",
        f"Siméoni et al. 2025 (DINOv3), section 3.2; {published.DINOV3}",
        {"base": 100, "grid": [rows, columns], "axes": ["row", "column"]},
        [2 * PI * w for w in plain(pairs, 100)] * 2,
        head_dim=8,
        positions=[
            [2 * (mpf(row) + 0.5) / rows - 1, 2 * (mpf(column) + 0.5) / columns - 1]
            for row in range(rows)
            for column in range(columns)
        ],
        axis=[0] * pairs + [1] * pairs,
    )
    published.check_dinov3(fractions)
    return [blocked, interleaved, grid, fractions]
