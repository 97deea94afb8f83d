"""Other code, and other values in it, have another fingerprint; what cannot be looked into is never alike."""

import ast
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import own_model
import pytest
import torch
from calls import compare

from relpos.comparison.callables import described, find_build, not_told_apart


def typed(source: str, name: str = "build") -> Callable[..., Any]:
    """A function as a notebook has it: without a file."""
    there: dict[str, Any] = {"__name__": "__main__"}
    exec(source, there)
    found: Callable[..., Any] = there[name]
    return found


def closing(held: Any) -> Callable[..., Any]:
    def build(position: str, task: Any) -> Any:
        return held

    return build


class Build:
    """An object that is called."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self, position: str, task: Any) -> Any:
        return self.held

    __call__ = method


class Hiding(Build):
    """One that says nothing of itself when it is sent to a process."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


HELD: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("number", lambda: 3, lambda: 4),
    ("kind of number", lambda: 1, lambda: True),
    ("nothing", lambda: None, lambda: 0),
    ("bytes", lambda: b"a", lambda: b"b"),
    ("dict", lambda: {"depth": 3}, lambda: {"depth": 4}),
    ("key", lambda: {"depth": 3}, lambda: {"width": 3}),
    ("list", lambda: [3, 6], lambda: [4, 8]),
    ("twice", lambda: [3, 3], lambda: [3]),
    ("nested", lambda: [[1], 2], lambda: [[1, 2]]),
    ("tuple", lambda: (3, 6), lambda: (3, 7)),
    ("set", lambda: {"a", "b"}, lambda: {"a", "c"}),
    ("frozenset", lambda: frozenset({1, 2}), lambda: frozenset({1, 3})),
    ("tensor", lambda: torch.zeros(3), lambda: torch.tensor([0.0, 0.0, 1.0])),
    ("shape", lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    ("dtype", lambda: torch.zeros(4, dtype=torch.int32), lambda: torch.zeros(4, dtype=torch.float32)),
    ("bfloat16", lambda: torch.zeros(2, dtype=torch.bfloat16), lambda: torch.ones(2, dtype=torch.bfloat16)),
    ("array", lambda: np.zeros(3), lambda: np.array([0.0, 0.0, 1.0])),
    ("object", lambda: Build(1), lambda: Build([1])),
    ("slots", lambda: Slotted((1,)), lambda: Slotted((2,))),
    ("path", lambda: Path("a"), lambda: Path("b")),
    ("torch dtype", lambda: torch.float32, lambda: torch.float64),
    ("builtin", lambda: len, lambda: max),
    ("module", lambda: torch.nn.Dropout(0.1), lambda: torch.nn.Dropout(0.2)),
]
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "closure": closing,
    "partial": lambda held: partial(own_model.step, sizes=held),
    "argument": lambda held: partial(own_model.step, held),
    "instance": Build,
    "hidden": Hiding,
    "method": lambda held: Build(held).method,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("one", "other"), [case[1:] for case in HELD], ids=[case[0] for case in HELD])
def test_what_a_function_holds_is_looked_at(holder: str, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    made = HOLDERS[holder]
    assert described(made(one())) == described(made(one()))
    assert described(made(one())) != described(made(other()))
    assert not_told_apart(described(made(one()))) is None


def test_names_of_keywords_of_a_partial() -> None:
    assert described(None) is None
    assert described(partial(own_model.step, depth=3)) != described(partial(own_model.step, width=3))


EDITS = [
    ("heads = (3, 6)", "heads = (4, 8)"),
    ("Model(depth=3)", "Model(width=3)"),
    ("SIZES = (1, 2)", "SIZES = (1, 3)"),
    ("KEPT = [5]", "KEPT = [6]"),
    ("task=7", "task=8"),
    ("return x + 1", "return x + 2"),
    ("self.two = 2", "self.two = 3"),
]
SOURCE = """
SIZES = (1, 2)
KEPT = [5]
def inner(x):
    return x + 1
class Base:
    def __init__(self, **given):
        self.two = 2
class Model(Base):
    @property
    def size(self):
        return inner(SIZES)
def build(position, task=7):
    heads = (3, 6)
    def later():
        return KEPT
    return Model(depth=3)
"""


@pytest.mark.parametrize(("before", "after"), EDITS, ids=[edit[0] for edit in EDITS])
def test_an_edit_in_a_notebook_is_seen(before: str, after: str) -> None:
    assert before in SOURCE
    assert described(typed(SOURCE)) == described(typed(SOURCE))
    assert described(typed(SOURCE)) != described(typed(SOURCE.replace(before, after)))


@pytest.mark.slow
def test_it_is_the_same_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import own_model\nfrom functools import partial\nfrom relpos.comparison.callables import described\n"
        "given = set('abcdefghij')\nprint(list(given))\n"
        "print(described(partial(own_model.build, given, depth=(1, 2), of={'k': [own_model.Pooled]})))"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYTHONHASHSEED", "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    given = set("abcdefghij")
    assert list(given) != ast.literal_eval(other.splitlines()[0]), "it says them in another order"
    own = described(partial(own_model.build, given, depth=(1, 2), of={"k": [own_model.Pooled]}))
    assert other.splitlines()[1] == str(own)


@pytest.mark.parametrize("make", [threading.Lock, lambda: (x for x in "ab"), lambda: io.TextIOWrapper(io.BytesIO())])
def test_what_cannot_be_looked_into_is_never_alike(make: Callable[[], Any]) -> None:
    build = closing(make())
    assert described(build) != described(build)
    assert not_told_apart(described(build)) is not None


@pytest.mark.slow
def test_a_comparison_that_is_not_taken_up_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = threading.Lock()

    def build(position: str, task: Any) -> Any:
        with lock:
            return own_model.build(position, task)

    folders = []
    for _ in range(2):
        result, lines = compare(None, build, "digits", ["none"], quick=True, steps=1)
        folders.append(result.folder)
        assert "Every call is a new comparison: model holds a _thread.lock, whose changes cannot be detected." in lines
        assert not any("is finished" in line for line in lines)
    assert folders[0] != folders[1]


def test_a_file_runs_as_it_was_hashed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def build(position, task):\n    return 1\n")
    first = find_build(f"{file}:build")
    assert first is not None
    before = described(first)
    file.write_text("def build(position, task):\n    return 2\n")
    second = find_build(f"{file}:build")
    assert second is not None
    assert (first("none", None), second("none", None)) == (1, 2)
    assert before == described(first) != described(second)
    assert pickle.loads(pickle.dumps(first))("none", None) == 1, "also in another process"
