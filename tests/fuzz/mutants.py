"""`python -m tests.fuzz.mutants --seed 0`: what the fuzzer finds of errors that are put into the code on purpose.

Mutants of streaming's and the masks' code are taken in an order that the seed decides, nobody picks them. Of each, the
fuzzer runs up to 2,000 calls on a copy of the source, until one fails.

What is no mutant, by rule and not by hand:

    lines that no one of the fuzzer's first calls runs
    docstrings, annotations, decorators, default arguments, module constants, assertions
    whatever stands inside `raise`, `fail(...)` or `require_...(...)`, and functions that only check arguments or choose
    between engines: they decide about messages and speed, and have tests of their own
    calls that fail without any change, which are left out
    a change after which the text says the same

Two kinds of survivors are set apart by what the functions of the mutated modules return, call by call, beside the same
functions unchanged. They are printed with the first function that differed, and do not count among the 20:

    speed    some function returned other stretches, shapes or whole numbers, or another function was called, and every
             result was right: the work is cut otherwise, and what is computed is the same
    idle     some function returned other numbers with fractions, and every result was the same bit for bit: nothing
             depends on them, such as the shift of a row that sees nothing
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
TARGETS = ("attention/streaming", "core/mask.py")
CHOOSING = {"slower", "is_pattern", "_border", "lacks"}
COVERING = 300
"""Seeds that tell which lines are run."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
PAIRS = (
    ("min", "max"), ("amin", "amax"), ("any", "all"), ("minimum", "maximum"), ("start", "stop"), ("low", "high"),
    ("left", "right"), ("query", "key"), ("queries", "keys"), ("rows", "columns"), ("query_segments", "key_segments"),
    ("query_order", "key_order"), ("query_global", "key_global"), ("first", "last"),
)  # fmt: skip
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One change: a stretch of a file's text, and what stands there instead."""

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


# what can be changed


def _changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Each mutant of a node; None where it goes altogether."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARED:
            yield ast.Compare(left, [COMPARED[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            yield ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in COMPUTED:
                yield ast.AugAssign(target, COMPUTED[type(op)](), value)
            yield None
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if name in OTHER:
            yield ast.Attribute(value, OTHER[name], ast.Load())
        case ast.Name(id="min" | "max" | "any" | "all" as name, ctx=ast.Load()):
            yield ast.Name(OTHER[name], ast.Load())
        case ast.Subscript(value=value, slice=ast.Tuple(elts=[first, second, *rest]), ctx=ctx):
            yield ast.Subscript(value, ast.Tuple([second, first, *rest], ast.Load()), ctx)
        case ast.Expr(value=ast.Call()):
            yield None
        case _:
            pass


def _left_out(node: ast.AST) -> bool:
    """Whether nothing inside is mutated."""
    match node:
        case ast.Raise() | ast.Assert():
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name == "fail" or name.startswith("require_")
        case ast.FunctionDef(name=name):
            return name in CHOOSING or name == "__post_init__" or name.strip("_").startswith("check")
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False


def _nodes(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Everything in the bodies of functions that may be mutated."""
    if _left_out(node):
        return
    if isinstance(node, ast.FunctionDef):
        for child in node.body:
            yield from _nodes(child, True)
        return
    if inside:
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, inside)


def mutants(source: pathlib.Path) -> list[Mutant]:
    """All of the targets, in the order of the files."""
    found = []
    for path in _files(source):
        text = path.read_text()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in _nodes(ast.parse(text)):
            for change in _changes(node):
                if change is not None and ast.unparse(change) == ast.unparse(node):
                    continue
                assert isinstance(node, ast.expr | ast.stmt)
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                start = starts[node.lineno - 1] + node.col_offset
                stop = starts[node.end_lineno - 1] + node.end_col_offset
                after = "pass" if change is None else ast.unparse(change)
                if isinstance(node, ast.expr) and not isinstance(change, ast.Constant | ast.Name):
                    after = f"({after})"
                found.append(
                    Mutant(
                        str(path.relative_to(source)),
                        node.lineno,
                        start,
                        stop,
                        " ".join(text[start:stop].split()),
                        after,
                    )
                )
    return found


def _files(source: pathlib.Path) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for target in TARGETS:
        path = source / "relpos" / target
        found += sorted(path.glob("*.py")) if path.is_dir() else [path]
    return found


# what a call does in the mutated modules


class Watch:
    """Which lines of some files run, and digests of what their functions return, with and without fractions."""

    def __init__(self, files: list[pathlib.Path], *, lines: bool) -> None:
        self.files, self.wants_lines = {str(path) for path in files}, lines
        self.lines: set[tuple[str, int]] = set()
        self.returned: list[str] = []
        self.fractions: list[str] = []

    def __enter__(self) -> Watch:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_lines = self.wants_lines
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return" and not self.wants_lines:
            self.returned.append(f"{frame.f_code.co_name} {_summary(arg, False)}")
            self.fractions.append(f"{frame.f_code.co_name} {_summary(arg, True)}")
        return self._within


def _summary(x: Any, fractions: bool) -> str:
    """What a result is; of its floating tensors the shapes alone, or all bits."""
    import torch

    if isinstance(x, torch.Tensor):
        if x.is_floating_point() and not fractions:
            return f"float{tuple(x.shape)}"
        return f"{_digest(x)} {tuple(x.shape)}"
    if isinstance(x, tuple | list):
        return f"[{','.join(_summary(one, fractions) for one in x)}]"
    if isinstance(x, int | str | slice | None.__class__):
        return repr(x)
    if hasattr(x, "__dataclass_fields__"):
        own = (_summary(getattr(x, name, None), fractions) for name in x.__dataclass_fields__)
        return f"{type(x).__name__}({','.join(own)})"
    return type(x).__name__


def _digest(x: Any) -> str:
    import torch

    flat = x.detach().reshape(-1).contiguous()
    return hashlib.md5(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:8] if x.numel() else "nothing"


# the processes


def _work(given: argparse.Namespace) -> None:
    """In a process of its own, on the source that PYTHONPATH names: a line of JSON for each seed."""
    sys.path.insert(0, str(HERE.parent.parent))
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
    import torch

    torch.set_num_threads(1)
    import relpos
    from fuzz import running
    from fuzz.drawing import draw
    from fuzz.running import ENGINES, check

    results: list[str] = []
    true = running._run

    def run(*given: Any) -> Any:
        out, lse, gradients = found = true(*given)
        results.extend(_digest(x) for x in (out, lse, *gradients.values()) if x is not None)
        return found

    running._run = run

    files = _files(pathlib.Path(relpos.__file__).parent.parent)
    first, last = (int(x) for x in given.work.split(":"))
    watch = Watch(files, lines=given.lines)
    skipped = {int(seed) for seed in given.skip.split(",") if seed}
    for seed in range(first, last):
        if seed in skipped:
            continue
        call = draw(seed)
        told: dict[str, Any] = {"seed": seed}
        if given.watch or given.lines:
            with watch:
                outcome = check(call, ("streaming",))
            told["returned"], watch.returned = watch.returned, []
            told["fractions"], watch.fractions = watch.fractions, []
            told["results"] = results.copy()
            results.clear()
        else:
            outcome = check(call, ENGINES)
        told["failures"] = {engine: wrong[-200:] for engine, wrong in outcome.failures.items()}
        print(json.dumps(told), flush=True)
        if outcome.failures and not given.keep_on:
            return
    print(json.dumps({"lines": sorted(watch.lines)}), flush=True)


def _process(source: pathlib.Path, *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.mutants", *options], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _told(source: pathlib.Path, *options: str, limit: float) -> Iterator[dict[str, Any]]:
    """What a process says, line by line; the last is {"timeout": ...} where it took too long."""
    process = _process(source, *options)
    until = time.monotonic() + limit
    assert process.stdout is not None
    import select

    try:
        while True:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                yield {"timeout": limit}
                return
            line = process.stdout.readline()
            if not line:
                if process.wait() != 0:
                    yield {"crash": process.returncode}
                return
            yield json.loads(line)
    finally:
        process.kill()
        process.wait()


def _copy(source: pathlib.Path, mutant: Mutant, into: pathlib.Path) -> pathlib.Path:
    shutil.copytree(source / "relpos", into / "relpos", ignore=shutil.ignore_patterns("__pycache__"))
    path = into / mutant.path
    text = path.read_text()
    path.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
    return into


def _judge(source: pathlib.Path, mutant: Mutant, calls: int, limit: float, skip: str) -> tuple[str, str]:
    """What became of a mutant, and why."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(source, mutant, pathlib.Path(folder))
        seed = -1
        for told in _told(copy, "--work", f"0:{calls}", "--skip", skip, limit=limit):
            if "timeout" in told:
                return "killed", f"hangs at seed {seed + 1}"
            if "crash" in told:
                return "killed", f"ends the process at seed {seed + 1}"
            seed = told.get("seed", seed)
            if told.get("failures"):
                engine, wrong = next(iter(told["failures"].items()))
                return "killed", f"seed {seed}, {engine}: {wrong.strip().splitlines()[-1][:90]}"
        both = (
            _told(each, "--work", f"0:{calls // 4}", "--watch", "--keep-on", "--skip", skip, limit=2 * limit)
            for each in (source, copy)
        )
        idle = ""
        for mine, theirs in zip(*both, strict=False):
            where = _first_other(mine, theirs, "returned")
            if where:
                return "speed", f"cuts the work otherwise from seed {mine['seed']} on ({where})"
            if mine.get("results") != theirs.get("results"):
                return "survived", f"seed {mine['seed']} rounds otherwise, and no call shows an error"
            idle = idle or _first_other(mine, theirs, "fractions")
        if idle:
            return "idle", f"every result is the same bit for bit, though {idle} returns other numbers"
    return "survived", "no call shows it"


def _first_other(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> str:
    """The first function that returned something else; "" where none did."""
    a, b = mine.get(name, []), theirs.get(name, [])
    if a == b:
        return ""
    return next((x.split()[0] for x, y in zip(a, b, strict=False) if x != y), "another number of calls")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which mutants are taken")
    parser.add_argument("--count", type=int, default=20, help="how many")
    parser.add_argument("--calls", type=int, default=2000, help="calls of the fuzzer for each at most")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each at most")
    parser.add_argument("--list", action="store_true", help="say only which they are")
    for hidden in ("--work", "--skip"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    for hidden in ("--watch", "--lines", "--keep-on"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        _work(given)
        return 0
    source = ROOT / "src"
    *_, last = _told(source, "--work", f"0:{COVERING}", "--lines", "--keep-on", limit=given.limit)
    run = {(str(pathlib.Path(path).relative_to(source)), line) for path, line in last["lines"]}
    every = mutants(source)
    reached = [mutant for mutant in every if (mutant.path, mutant.line) in run]
    print(f"{len(every):,} mutants, {len(reached):,} of them on lines that {COVERING} calls run")
    failing = ""
    if not given.list:
        unchanged = _told(source, "--work", f"0:{given.calls}", "--keep-on", limit=given.limit)
        failing = ",".join(str(told["seed"]) for told in unchanged if told.get("failures"))
        print(
            f"unchanged, the code fails on {len(failing.split(',')) if failing else 'none'} of {given.calls:,} calls",
            flush=True,
        )
    random.Random(given.seed).shuffle(reached)
    verdicts = {"killed": 0, "survived": 0, "speed": 0, "idle": 0}
    for mutant in reached:
        if verdicts["killed"] + verdicts["survived"] == given.count:
            break
        if given.list:
            print(mutant)
            verdicts["killed"] += 1
            continue
        verdict, why = _judge(source, mutant, given.calls, given.limit, failing)
        verdicts[verdict] += 1
        print(f"{verdict:9} {mutant}\n          {why}", flush=True)
    if not given.list:
        besides = f"{verdicts['speed']} change speed alone, {verdicts['idle']} change nothing"
        print(f"{verdicts['killed']} of {verdicts['killed'] + verdicts['survived']} killed; besides, {besides}")
    return 0 if verdicts["survived"] <= given.count // 20 else 1


if __name__ == "__main__":
    sys.exit(main())
