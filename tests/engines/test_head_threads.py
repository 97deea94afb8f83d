"""Heads that threads compute side by side: the same results as by one thread, and a process left as it was."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from engine_steps import with_gradients
from torch import Tensor
from torch.utils import _pytree as pytree

from patience import PATIENCE
from relpos import DisentangledPosition, RelativePositionBias, ShawPosition, T5Bias, TransformerXLPosition
from relpos.core import Coordinates, Grid, Mask, Sequence, Terms
from relpos.engines import attention
from relpos.engines.call import Call
from relpos.engines.streaming.cpu import head_threads
from relpos.engines.streaming.plan import chunks
from relpos.position import Mechanism

FAST_CASES = 3  # of each of its tests, in the fast part

BATCH, HEADS, N, D = 2, 6, 70, 8
POSITIONS: dict[str, tuple[Callable[[], Mechanism | None], Coordinates]] = {
    "none": (lambda: None, Sequence(N)),
    "sequence": (lambda: T5Bias(HEADS, init_std=1.0), Sequence(N)),
    "grid": (lambda: RelativePositionBias(HEADS, window_size=(7, 9), prefix=2, init_std=1.0), Grid(7, 9, prefix=2)),
    "shaw": (lambda: ShawPosition(D, max_distance=5, init_std=1.0), Sequence(N)),
    "deberta": (lambda: DisentangledPosition(HEADS, D, 16, span=8, max_distance=16, init_std=1.0), Sequence(N)),
    "transformer_xl": (lambda: TransformerXLPosition(HEADS, D, 16, init_std=1.0), Sequence(N)),
}


@pytest.fixture(autouse=True)
def threads_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call is large enough for threads, and they may have a core each."""
    monkeypatch.setattr(head_threads, "_LEAST", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prepared(
    name: str,
    dtype: torch.dtype = torch.float32,
    groups: int = 1,
    mask: Mask | None = None,
    dropout: float = 0.0,
    batch: int = BATCH,
) -> Callable[[int], list[Tensor]]:
    """A function that gives output and gradients by so many threads. What a mechanism computes before attention, such
    as a product of MKL, may differ by the number of threads: the engine is given its terms."""
    make, where = POSITIONS[name]
    position, leaves = make(), list[Tensor]()

    def leaf(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        leaves.append(x.detach().requires_grad_(x.requires_grad))
        return leaves[-1]

    terms = None if position is None else pytree.tree_map_only(Tensor, leaf, position.terms(where, where))
    sizes = ((batch, heads, where.count, D) for heads in (HEADS, *[HEADS // groups] * 2))
    q, k, v = (torch.randn(size).to(dtype).requires_grad_() for size in sizes)
    upstream = torch.randn(q.shape).to(dtype)
    learned = [q, k, v, *(x for x in leaves if x.requires_grad)]

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        out = attention(q, k, v, position=terms, mask=mask, dropout=dropout, backend="streaming")
        return with_gradients(out, learned, upstream)

    return run


def assert_same_bits(run: Callable[[int], list[Tensor]], *counts: int) -> None:
    """By one thread and by so many."""
    one = run(1)
    for threads in counts:
        torch.testing.assert_close(run(threads), one, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "sequence", "grid", "deberta", "transformer_xl"])
def test_threads_of_one_each_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """A batch, so that elements of it share tables; in half precision sums over keys are rounded head by head."""
    assert_same_bits(prepared(name, dtype), 2, 3)


@pytest.mark.parametrize("groups", [2, 3, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_that_share_keys(groups: int, dtype: torch.dtype) -> None:
    assert_same_bits(prepared("sequence", dtype, groups), 2, 3)


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(9, 3), Mask.packed(torch.arange(N) // 30)])
def test_masks_and_dropout(mask: Mask) -> None:
    assert_same_bits(prepared("sequence", mask=mask, dropout=0.3), 2)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_a_table_that_all_heads_share(threads: int, batch: int) -> None:
    """Each thread has sums of its own, which are added in an order that does not vary."""
    run = prepared("shaw", batch=batch)
    few, many, again = run(1), run(threads), run(threads)
    torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(many, again, rtol=0, atol=0)


def test_the_number_of_threads_stays() -> None:
    """The caller's, and that of threads which begin later."""
    head_threads._started.cache_clear()
    prepared("sequence")(3)
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3


@pytest.mark.parametrize(("count", "each"), [(2, 1), (2, 3), (4, 1)])
def test_each_thread_has_its_part(count: int, each: int) -> None:
    torch.set_num_threads(count * each)
    head_threads._started.cache_clear()
    together, seen = threading.Barrier(count), []

    def work() -> None:
        together.wait(60)
        torch.zeros(2**16).add_(1)  # an operation that threads share
        seen.append((threading.get_ident(), torch.get_num_threads()))

    head_threads.run_all([work] * count)
    assert len({thread for thread, _ in seen}) == count
    assert {threads for _, threads in seen} == {each}


def test_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller computes, the one thread that did start ends, and the number of threads is what it was."""
    run, start = prepared("sequence"), threading.Thread.start
    expected, started = run(1), list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    head_threads._started.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start_one)
    torch.testing.assert_close(run(3), expected)
    monkeypatch.undo()
    started[0].join(60)
    assert not started[0].is_alive()
    assert torch.get_num_threads() == 3


AFTER_MAIN = """
import atexit, sys, threading, torch, relpos
from relpos.engines.streaming.cpu import head_threads
head_threads._LEAST = 1
torch.set_num_threads(2)
bias, wait = relpos.T5Bias(4), threading.Event()

def step():
    wait.wait(0.3)
    q = torch.randn(1, 4, 90, 8, requires_grad=True)
    relpos.attention(q, q, q, position=bias, queries=relpos.Sequence(90), backend="streaming").sum().backward()
    print("done", flush=True)

if sys.argv[1] == "early":
    step()
threading.Thread(target=step).start()
atexit.register(step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_while_the_interpreter_ends(when: str) -> None:
    found = subprocess.run([sys.executable, "-c", AFTER_MAIN, when], capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["done"] * (3 if when == "early" else 2)
    assert not found.stderr


def test_threads_share_what_is_copied() -> None:
    """Inputs of a layout that is copied are copied once, not by each thread."""
    run, counts, make = prepared("deberta"), [], chunks.CallTensors.__init__
    for threads in (1, 3):
        with mock.patch.object(chunks.CallTensors, "__init__", autospec=True, side_effect=make) as copied:
            run(threads)
        counts.append(copied.call_count)
    assert counts[0] == counts[1]


def test_callers_in_several_threads() -> None:
    """They share a pool, and wait for one another at worst."""
    run = prepared("deberta")
    expected = run(1)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, [2] * 4):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_inference_mode() -> None:
    make, where = POSITIONS["deberta"]
    position, (q, k, v), outs = make(), torch.randn(3, 1, HEADS, N, D), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            outs.append(attention(q, k, v, position=position, queries=where, keys=where, backend="streaming"))
    assert all(out.is_inference() for out in outs)
    assert torch.equal(*outs)


def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("of a share")

    done: list[int] = []
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="of a share"):
        head_threads.run_all([fail, lambda: done.append(1)])
    assert done == [1]


def call(shares: int, tokens: int = 64, device: str = "meta") -> Call:
    q = torch.empty(1, max(1, shares), tokens, 8, device=device)
    return Call(q, q, q, Terms(), None, 1.0)


@pytest.mark.parametrize(
    ("shares", "threads", "expected"),
    [(8, 1, 1), (8, 2, 2), (8, 8, 8), (1, 8, 1), (12, 8, 4), (6, 4, 2), (7, 2, 2), (3, 2, 1), (8, 16, 8), (0, 4, 1)],
)
def test_how_many_threads_take_heads(shares: int, threads: int, expected: int) -> None:
    """As many as share the heads about equally; what is left of PyTorch's threads is divided among them."""
    torch.set_num_threads(threads)
    assert head_threads.workers(call(shares, device="cpu"), shares) == expected


def test_where_threads_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    assert head_threads.workers(call(8), 8) == 1  # another device
    monkeypatch.setattr(head_threads, "_LEAST", 2**14)
    assert head_threads.workers(call(8, 64, "cpu"), 8) == 2  # 2**15 scores
    assert head_threads.workers(call(2, 64, "cpu"), 2) == 1
    monkeypatch.setattr(head_threads, "_LEAST", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    assert head_threads.workers(call(8, device="cpu"), 8) == 1  # all threads would be on one core
