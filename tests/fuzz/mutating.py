"""What can be changed in a piece of code so that it is wrong: the mutants of some modules, found by rules."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TARGETS = ("engines/streaming", "core/mask.py")
CHOOSING = {"_triton", "_streaming", "_reference", "is_pattern", "_border", "lacks", "native", "rounding_operands"}
"""Functions that choose between engines, or how fast a product is."""

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
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


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
            if value:  # an index -1 is the entry 0 of whatever has one
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
        case ast.keyword(arg="strict"):  # an assertion
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name == "fail" or name.startswith("require_")
        case ast.If(body=body, orelse=[]):  # what asks whether to raise
            return _left_out(body[-1])
        case ast.FunctionDef(name=name):
            return name in CHOOSING or name == "__post_init__" or name.strip("_").startswith("check")
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant) or _left_out(value)
        case _:
            return False


def _nodes(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Everything in the bodies of functions that may be mutated, and in which function it is."""
    if _left_out(node):
        return
    if isinstance(node, ast.If) and _left_out(node.body[-1]):  # asks whether to raise, and what else to do
        for child in node.orelse:
            yield from _nodes(child, function)
        return
    if isinstance(node, ast.FunctionDef):
        for child in node.body:
            yield from _nodes(child, node.name)
        return
    if function:
        yield node, function
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, function)


def mutants(source: pathlib.Path, targets: Sequence[str] = TARGETS) -> list[Mutant]:
    """All of the targets, in the order of the files."""
    found = []
    for path in files_of(source, targets):
        text = path.read_text()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node, function in _nodes(ast.parse(text)):
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
                where, before = str(path.relative_to(source)), " ".join(text[start:stop].split())
                found.append(Mutant(where, node.lineno, start, stop, before, after, function))
    return found


def files_of(source: pathlib.Path, targets: Sequence[str] = TARGETS) -> list[pathlib.Path]:
    found: list[pathlib.Path] = []
    for target in targets:
        path = source / "relpos" / target
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found
