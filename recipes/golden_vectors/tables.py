"""Cases of buckets, slopes and rows of tables."""

from __future__ import annotations

import published
from formulas import Case
from mpmath import mpf


def slopes(heads: int) -> list[mpf]:
    """ALiBi's slopes; beyond a power of two every other one of twice as many heads."""
    power = 1 << (heads.bit_length() - 1)
    own = [mpf(2) ** (mpf(-8 * (h + 1)) / power) for h in range(power)]
    return own + [mpf(2) ** (mpf(-4 * (2 * h + 1)) / power) for h in range(heads - power)]


def integers() -> list[Case]:
    """T5's buckets, Shaw's clipping, ALiBi's slopes, and rows of the tables of Swin and BEiT."""
    made: list[Case] = []
    offsets = [
        -300,
        -129,
        -128,
        -127,
        -91,
        -64,
        -33,
        -20,
        -16,
        -12,
        *range(-9, 10),
        12,
        16,
        20,
        33,
        64,
        91,
        127,
        128,
        300,
    ]
    t5 = f"Raffel et al. 2020, section 2.1; {published.T5}"
    for name, both, buckets, far in (
        ("bidirectional", True, 32, 128),
        ("causal", False, 32, 128),
        ("small", True, 8, 20),
    ):
        own = {"bidirectional": both, "num_buckets": buckets, "max_distance": far}
        found = published.t5_buckets(offsets, **own)
        made.append(
            {
                "name": f"t5_{name}",
                "kind": "buckets",
                "source": t5,
                "parameters": own,
                "offsets": offsets,
                "buckets": found,
            }
        )
    clip = [min(max(-offset, -4), 4) + 4 for offset in offsets]
    made.append(
        {
            "name": "shaw_clipping",
            "kind": "buckets",
            "source": "Shaw et al. 2018, section 3.2: w of clip(key - query, k), counted from w[-k]",
            "parameters": {"max_distance": 4},
            "offsets": offsets,
            "buckets": clip,
        }
    )
    for heads in (1, 3, 8, 12, 16, 20):
        found = slopes(heads)
        published.check_slopes(heads, found)
        source = f"Press et al. 2022 (ALiBi), section 3, and get_slopes of their code; {published.SLOPES}"
        own = {"num_heads": heads}
        made.append({"name": f"alibi_{heads}", "kind": "slopes", "source": source, "parameters": own, "slopes": found})
    for name, window in (("swin", [2, 3]), ("swin_square", [3, 3]), ("beit", [2, 3])):
        source, rows, index = published.table_index(name, window)
        own = {"window": window, "prefix": int(name == "beit")}
        made.append(
            {
                "name": f"{name}_index",
                "kind": "index",
                "source": source,
                "parameters": own,
                "rows": rows,
                "index": index,
            }
        )
    return made
