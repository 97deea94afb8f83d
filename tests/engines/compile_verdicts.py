"""A compiled function takes a kernel that must be checked once it is known to be right. A script, not a test:

    python tests/engines/compile_verdicts.py

The streaming engine stands for a kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from relpos import LineBias, Mask, Sequence, attention, explain, lines
from relpos.engines.selection import SLOWER
from relpos.engines.self_check import verdicts
from relpos.engines.streaming import STREAMING


def main() -> None:
    torch.set_num_threads(1)
    STREAMING.checked_on = ("cpu",)  # type: ignore[misc]
    SLOWER["streaming"] = lambda call, kind: None
    line = lines(Sequence(12))
    position = LineBias(torch.randn(2, line.length, requires_grad=True), line)
    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(lambda q, k, v: attention(q, k, v, position=position), fullgraph=True, backend=keep)
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    compiled(q, k, v)
    assert "relpos.streaming" not in graphs[-1], "not known, and passed over"
    assert not verdicts._agreed, "nothing is run"
    with torch.no_grad():
        attention(q, k, v, position=position)
    compiled(q, k, v)
    assert len(graphs) == 2
    assert "relpos.streaming" in graphs[-1], "known"
    attention(*(x.bfloat16() for x in (q, k, v)), position=position)
    compiled(q, k, v)
    assert len(graphs) == 2, "what became known of another variant changes nothing"

    def taken(q: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"position": position, "mask": Mask.window(5, 0), "dropout": 0.1}
        return q + 1 if explain(q, q, q, **given).backend == "streaming" else q

    symbols = torch.compile(taken, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(symbols(q), q), "not known"
    taken(q)
    assert torch.equal(symbols(q), q + 1), "known, of sizes that are symbols too"
    longer = torch.randn(3, 2, 12, 8)
    assert torch.equal(symbols(longer), longer + 1), "and of another batch"
    print("ok      as it should")


if __name__ == "__main__":
    main()
