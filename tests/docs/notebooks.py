"""A notebook's code cells, run in order as a kernel would run them.

python tests/docs/notebooks.py docs/yours.ipynb        runs it and keeps in it what the cells print and return
"""

import ast
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cells_run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Each code cell once it has run, with what it printed and the value of its last expression, or None."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
            value = None
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
        yield cell, printed.getvalue(), value


def _outputs(printed: str, value: object) -> list[dict[str, Any]]:
    """What a notebook keeps of a cell; pictures are left out, since they are long."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        found.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()  # a notebook may leave for another folder
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, printed, value) in enumerate(cells_run(notebook), start=1):
        cell["outputs"], cell["execution_count"] = _outputs(printed, value), number
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
