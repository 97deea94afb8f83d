"""Where the documents err, in one table: section, what it says, what is right and why."""

# ruff: noqa: E501
# Lines of text are as long as they read best.

from __future__ import annotations

import computed
import printed
from layout import number, table, vector, wrong_entries

WHY_RELATIVE = (
    "(0, 3) lacks its +0.3",
    "(1, 0) lacks its -0.2; (1, 2) has a -0.2 that no entry gives; (1, 3) has +0.2 instead of +0.1",
    "(2, 3) starts from 6.2's wrong 0.707, and has -0.1 instead of +0.2",
    "(3, 1) lacks its -0.1; (3, 2) starts from 6.2's wrong 0.707",
)


def corrections() -> str:
    """The last section of the page."""
    a, y = computed.absolute(), computed.coordinates_added()
    relative, rope = computed.relative(), computed.rope()
    count = {
        "6.2": len(wrong_entries(computed.without_position(), printed.WITHOUT_POSITION)),
        "6.3": len(wrong_entries(a, printed.ABSOLUTE)),
        "6.4": len(wrong_entries(relative, printed.RELATIVE)),
        "14": len(wrong_entries(rope, printed.ROPE)),
    }
    figures = [
        [
            "6.2",
            f"scores (2, 3) and (3, 2) are {number(printed.WITHOUT_POSITION[2][3])}",
            "0",
            f"patch 3 is the zero vector ({count['6.2']} entries)",
        ],
        [
            "6.3",
            "K2 = [1.5, 0]",
            vector(y[2], 1),
            "patch 2 is [1, 1]; row 0 is still right: its query is [1, 0]",
        ],
        *(
            [
                "6.3",
                f"row {i} is {vector(printed.ABSOLUTE[i])}",
                vector(a[i]),
                "vectors were added to some patches and not to others",
            ]
            for i in (1, 2, 3)
        ),
        [
            "6.4",
            "seven offsets",
            "nine",
            "(-1, 1) and (1, -1), between patches 1 and 2, are missing",
        ],
        *(
            ["6.4, 7", f"row {i} is {vector(printed.RELATIVE[i])}", vector(relative[i]), why]
            for i, why in enumerate(WHY_RELATIVE)
        ),
        ["12", "2 R_max + 14 values", "2 R_max + 1", "the next line's table has as many"],
        [
            "14, RoPE",
            f"place 2 is {vector(printed.TURNED[2])}",
            vector(computed.turned()[2]),
            "cos 60 - sin 60 is negative",
        ],
        *(["14, RoPE", f"row {i} is {vector(printed.ROPE[i])}", vector(rope[i]), "follows from it"] for i in range(3)),
    ]
    readings = [
        ["6.4, 6.6, 7, 8", "(+1, 0) is the neighbour below", "above: offset = query - key, as 6.4 itself computes"],
        ["7.3, 7.4", "patch 1 looks left or down, patch 3 left", "patch 1 at itself and patch 2, patch 3 at itself"],
        ["7.3", "(-1, 1) has the bias +0.3", "it has none; +0.3 is (-1, -1)"],
        ["7.5", '"favor queries looking downward"', "a query favours keys"],
        ["6.2", "shuffling patches would not change the scores", "rows and columns are shuffled alike"],
        ["11.2", "permutation-invariant", "permutation-equivariant; a pooled output is invariant"],
        ["4, 6.5, 13.5", "translation invariance", "equivariance, and up to the edge of the image or window"],
        [
            "4, 8.4",
            "no interpolation on larger images",
            "true of windows of one size; a table for a whole image must grow",
        ],
        [
            "9.1, 12.4, 13.5",
            "Swin adds one table for rows and one for columns",
            "Swin has one joint table, as 12.4's code shows",
        ],
        ["12.4, 13.5", "the sum of the two tables has no plus before the first", "content + b_h + b_w"],
        ["9.3", "T5's table has (2H-1)(2W-1) entries per head", "T5's has num_buckets entries per head"],
        ["12.5", "next tokens raise b(+1), b(+2)", "b(-1), b(-2): j > i means i - j < 0"],
        ["12.6", "upper right looks backward, lower left forward", "the other way round"],
        ["12.6", "patches more than 6 apart are equally distant", "inside Swin's 7 x 7 window there are none"],
        ["12.6", "T5 has one bucket per distance for 0 to 16", "for 0 to 7 in encoders, 0 to 15 in decoders"],
        [
            "12.3",
            "Transformer-XL shares one embedding beyond 16 to 64",
            "it does not clip: a sinusoid of every distance",
        ],
        ["14", "the additive example favours the future", "the past: positive i - j"],
        [
            "14, 13.4",
            "- m (i - j) as such; it penalises forward distance",
            "it penalises the past, and rewards the future unless masked",
        ],
        ["14", "RoPE's row 1 and row 2 are one pattern, shifted", "only where tokens are equal"],
        [
            "13.3",
            "xPos lets RoPE and learned biases combine",
            "they always combine: one rotates q and k, one is added; xPos adds a decay",
        ],
        [
            "13",
            "ALiBi is used in Mistral and Falcon",
            "Mistral has RoPE; so have Falcon-7B and 40B (Falcon-RW has ALiBi)",
        ],
        [
            "13",
            "DeBERTa and ViTDet add a scalar per distance",
            "their vectors are multiplied with queries (and keys): scores depend on content",
        ],
        [
            "1",
            "`x = cls_token + x` prepends the class token",
            "that adds it to every patch; `torch.cat` prepends, before positions are added",
        ],
        ["implementation details", "T5's bias table is (num_buckets,)", "(num_buckets, num_heads)"],
    ]
    return f"""
## Corrections

Figures:

{table(["section", "the document", "right", "why"], figures)}

{count["6.2"]}, {count["6.3"]}, {count["6.4"]} and {count["14"]} entries of the matrices of 6.2, 6.3, 6.4 and RoPE are wrong. The
matrices of 12.6, and of 14 for the additive bias, Shaw and ALiBi, are right as printed.

Readings and facts:

{table(["section", "the document", "right"], readings)}
"""
