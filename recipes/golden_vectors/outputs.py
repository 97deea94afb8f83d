"""Cases of whole attention: a rotation, T5's bias, ALiBi."""

from __future__ import annotations

from typing import Any

from formulas import Case, content, pairs_of, plain
from mpmath import cos, exp, mpf, sin, sqrt
from tables import slopes

HEADS, TOKENS, WIDTH = 2, 5, 4


def tensors() -> dict[str, list[list[list[float]]]]:
    """q, k and v, [heads][tokens][width]."""
    return {
        name: [[content(WIDTH, shift + 7 * h + 2 * i) for i in range(TOKENS)] for h in range(HEADS)]
        for shift, name in enumerate("qkv")
    }


def attended(q: Any, k: Any, v: Any, bias: Any, scale: Any, *, causal: bool) -> list[list[list[mpf]]]:
    """softmax(scale * q k + bias) v, by loops. bias: of head, query and key."""
    made = []
    for h in range(HEADS):
        rows = []
        for i in range(TOKENS):
            seen = range(i + 1) if causal else range(TOKENS)
            scores = [
                scale * sum(mpf(a) * b for a, b in zip(q[h][i], k[h][j], strict=True)) + bias(h, i, j) for j in seen
            ]
            weights = [exp(one) for one in scores]
            rows.append(
                [sum(w * v[h][j][d] for w, j in zip(weights, seen, strict=True)) / sum(weights) for d in range(WIDTH)]
            )
        made.append(rows)
    return made


def rotated(x: Any) -> list[list[list[mpf]]]:
    """Every token rotated by its position, in interleaved pairs, base 10,000."""
    made = [[[mpf(one) for one in token] for token in head] for head in x]
    for head, own in zip(made, x, strict=True):
        for i, (token, given) in enumerate(zip(head, own, strict=True)):
            for (a, b), w in zip(pairs_of("interleaved", WIDTH // 2), plain(WIDTH // 2, 10000), strict=True):
                token[a] = given[a] * cos(i * w) - given[b] * sin(i * w)
                token[b] = given[a] * sin(i * w) + given[b] * cos(i * w)
    return made


def outputs(cases: dict[str, Case]) -> list[Case]:
    """One output each; tokens are at positions 0 to 4."""
    own, usual = tensors(), 1 / sqrt(mpf(WIDTH))
    q, k, v = own.values()

    def case(name: str, source: str, parameters: Case, output: Any, scale: Any, *, causal: bool, **more: Any) -> Case:
        given = {"scale": scale, "causal": causal, **parameters}
        made = {"name": name, "kind": "attention", "source": source, "parameters": given, **own, **more}
        return made | {"output": output}

    rope = attended(rotated(q), rotated(k), v, lambda h, i, j: 0, usual, causal=True)
    table = [[((7 * bucket + 5 * h) % 9 - 4) / 4 for h in range(HEADS)] for bucket in range(8)]
    small = cases["t5_small"]
    bucket = dict(zip(small["offsets"], small["buckets"], strict=True))
    t5 = attended(q, k, v, lambda h, i, j: table[bucket[i - j]][h], mpf(1), causal=False)
    alibi = attended(q, k, v, lambda h, i, j: -slopes(HEADS)[h] * abs(i - j), usual, causal=True)
    return [
        case(
            "attention_rope",
            "Su et al. 2021 (RoFormer), section 3.2",
            {"base": 10000, "layout": "interleaved"},
            rope,
            usual,
            causal=True,
        ),
        case(
            "attention_t5",
            f"{small['source']}; Raffel et al. do not divide scores by sqrt(head_dim)",
            small["parameters"],
            t5,
            mpf(1),
            causal=False,
            table=table,
        ),
        case(
            "attention_alibi", "Press et al. 2022 (ALiBi), section 3", {"num_heads": HEADS}, alibi, usual, causal=True
        ),
    ]
