"""The page's sections on order, clipping and the four mechanisms: 11 to 14 of the documents."""

# ruff: noqa: E501
# Lines of text are as long as they read best.

from __future__ import annotations

import itertools

import computed
import printed
from layout import beside, block, code, table, vector

import relpos


def permutation() -> str:
    """Section 11.2."""
    found, position = computed.shuffled(), computed.shuffled(computed.bias_of([computed.TABLE], (2, 2)))
    order = computed.SHUFFLE
    rows = [
        [
            place,
            f"patch {patch}",
            vector(found["shuffled"][place]),
            vector(found["in order"][patch]),
            vector(position["shuffled"][place]),
            vector(position["in order"][patch]),
        ]
        for place, patch in enumerate(order)
    ]
    head = [
        "place",
        "holds",
        "output, no position",
        "the same patch unshuffled",
        "output, relative bias",
        "the same patch unshuffled",
    ]
    mean = table(
        ["mean over the four places", "in order", "shuffled"],
        [
            ["no position", vector(found["in order"].mean(dim=0)), vector(found["shuffled"].mean(dim=0))],
            ["relative bias", vector(position["in order"].mean(dim=0)), vector(position["shuffled"].mean(dim=0))],
        ],
    )
    return f"""
## Without position, order means nothing (11.2)

The document says that attention without position is permutation-*invariant*: "if you shuffle the tokens, the result doesn't
change". Precisely: shuffled tokens give the same outputs in the shuffled order. That is permutation-*equivariant*. Pooled outputs,
such as their mean, are *invariant*. Here the order of the patches is {order}:

{table(head, rows)}

{mean}

Without position each patch keeps its output at any place, and the mean cannot tell the two images apart. With the bias of
section 6.4 it can. (Under a causal mask even attention without position can tell: the first token sees one token, the second two.)
"""


def clipping() -> str:
    """Section 12."""
    both, causal = computed.t5_edges(bidirectional=True), computed.t5_edges(bidirectional=False)
    rows = relpos.RelativePositionBias(1, window_size=(7, 7)).relative_position_bias_table.shape[0]
    return f"""
## Clipping far offsets (12)

A table for R_max = 2 has 2 x 2 + 1 = {len(computed.BIAS_1D)} numbers: 2 R_max + 1, not the printed "2 R_max + 14". For a sequence of
seven the offsets i - j run from -6 to 6 and are cut to -2 ... 2:

{table(["query, key", *range(7)], [[i, *row] for i, row in enumerate(computed.clipped_offsets())])}

The biases are {", ".join(f"{r:+d}: {value:+.1f}" if r else "0: 0.0" for r, value in computed.BIAS_1D.items())}. The printed
matrix is right:

{beside(computed.clipped(), printed.CLIPPED, digits=1)}

![The clipped bias of every query and key](examples/clipped.png)

{code(computed.clipped)}

Three remarks on the text around it.

- The upper right has j > i and negative offsets: those keys come *after* the query. The document calls that looking backward; it is
  looking forward, into the future, and this table discourages it.
- For the same reason, a model that gains from attending to *next* tokens raises b(-1) and b(-2), not b(+1) and b(+2) (12.5).
- Swin's table for a 7 x 7 window has {rows} rows, (2 x 7 - 1)^2, and nothing is clipped: inside the window no offset is beyond 6.

**T5's buckets.** With T5's 32 buckets up to 128, an encoder has 16 for each direction. A bucket begins at each of these distances:
{", ".join(map(str, both))}. A decoder has all 32 for the past: {", ".join(map(str, causal))}. So distances up to
{first_shared(both) - 1} or {first_shared(causal) - 1} have a bucket of their own, not 0 to 16, and the edges beyond grow slower than by
doubling.
"""


def first_shared(edges: list[int]) -> int:
    """The first distance that shares its bucket with the next one."""
    return next(edge for edge, following in itertools.pairwise(edges) if following > edge + 1)


def four_mechanisms() -> str:
    """Section 14."""
    y = computed.turned()
    one_way, both_ways = computed.alibi(both_ways=False), computed.alibi(both_ways=True)
    causal = computed.alibi_causal_weights(both_ways=True)
    same = computed.same_token()
    turned = table(
        ["place", "x", "turned by", "computed", "as printed"],
        [
            [n, vector(computed.TOKENS[n], 0), f"{30 * n} degrees", vector(y[n]), vector(printed.TURNED[n])]
            for n in range(3)
        ],
    )
    return f"""
## Three tokens, four mechanisms (14)

The tokens are [1, 0], [0, 1] and [1, 1], and their content scores the first three rows and columns of the image above.

**A number per offset.** b(-2) ... b(2) = {", ".join(f"{value:.1f}" for value in computed.BIAS_1D.values())}. The printed matrix is right:

{beside(computed.additive(), printed.ADDITIVE)}

Its comment is not: a positive i - j is a key in the *past*, so this table shifts attention to the past, not to "future tokens".

**A vector per offset (Shaw).** The vectors {", ".join(f"({a:g}, {b:g})" for a, b in computed.SHAW.values())} for r = -2 ... 2 are multiplied with the query:
score = <x[i], x[j] + r[i - j]> / sqrt(2). The printed matrix is right:

{beside(computed.shaw(), printed.SHAW)}

{code(computed.shaw)}

Token 1 is [0, 1] and the second number of each vector is 0: its row is content alone. This is "content-dependent": the query
decides whether an offset matters.

**A rotation (RoPE).** 30 degrees per position.

{turned}

At 60 degrees [1, 1] becomes [cos 60 - sin 60, sin 60 + cos 60] = [0.5 - 0.866, 0.866 + 0.5]: the first number is
*negative*. Four scores follow from it, and the summary of section 14 repeats the wrong sign:

{beside(computed.rope(), printed.ROPE)}

{code(computed.rope)}

"Relative" means: where the content is the same, the score depends on the offset alone. Three tokens [1, 0] show it, with a constant
along every diagonal, cos(30 degrees x offset) / sqrt(2):

{block(same)}

**A slope (ALiBi).** Minus 0.1 x (i - j). The printed arithmetic is right, but the formula is for causal use: without a mask, keys
in the future get +0.1 and +0.2, more for farther keys. `relpos.ALiBi` takes |i - j|:

{beside(one_way, printed.ALIBI)}

with |i - j|:

{block(both_ways)}

Under a causal mask both give the same attention:

{block(causal)}

![The scores of four mechanisms for three tokens](examples/four.png)

Published slopes are not 0.1; for 8 heads they are {", ".join(f"1/{round(1 / slope)}" for slope in relpos.alibi_slopes(8))}.
"""
