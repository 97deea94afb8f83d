"""Heads in parallel on a CPU: each thread computes some of the heads.

When all threads share each operation on a tile, they wait for one another at its end, and a core reads what other cores
have written. A thread that computes whole heads avoids both. If each such thread uses one PyTorch thread, results do
not depend on the number of threads. Native bfloat16 is no faster this way, so it does not use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock

import torch

from relpos.engines.call import Call

_SHARED_EFFICIENCY = 0.8
"""Efficiency of threads that share each operation, relative to threads with heads of their own."""
_LEAST = 2**23
"""Minimum scores per thread that justify waking it: 1,449 tokens and 8 heads for two threads. PyTorch's own threads
spin for 5 ms after each operation, and occupy a core meanwhile."""
_starting = Lock()


def workers(call: Call, shares: int) -> int:
    """How many threads finish the equal shares soonest; each gets an equal part of PyTorch's threads."""
    threads = torch.get_num_threads()
    if call.q.device.type != "cpu" or threads == 1:
        return 1
    batch, heads, n, _ = call.q.shape
    most = min(shares, threads, batch * heads * n * call.k.shape[2] // _LEAST)
    if hasattr(os, "sched_getaffinity"):  # a thread inherits its parent's affinity, which OpenMP may have bound
        most = min(most, len(os.sched_getaffinity(0)))
    return max(range(1, most + 1), key=lambda count: (_busy(shares, count, threads), count), default=1)


def _busy(shares: int, count: int, threads: int) -> float:
    """The fraction of all threads' time that does useful work."""
    rounds, each = -(-shares // count), threads // count
    return shares / (rounds * count) * (each * count / threads) * (1 if each == 1 else _SHARED_EFFICIENCY)


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Run each work in its own thread. The caller's thread runs a single work, and works for which no thread can start
    (the machine has no more, or the interpreter is shutting down)."""
    if len(works) == 1:
        works[0]()
        return
    inference, left = torch.is_inference_mode_enabled(), list(works)
    running: list[Future[None]] = []
    error: BaseException | None = None
    try:
        try:
            pool = _pool(len(works), torch.get_num_threads() // len(works))
            while left:
                running.append(pool.submit(_without_gradients, left[0], inference))
                del left[0]
        except RuntimeError:  # only from `_pool` and `submit`; the error of a work stays in its future
            pass
        for work in left:
            work()
    finally:
        errors = [work.exception() for work in running]
    try:
        for error in errors:
            if error is not None:
                raise error
    finally:
        del running, errors, error  # the traceback holds this frame


def _without_gradients(work: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work()


def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """A pool of `count` threads, each with `threads` PyTorch threads."""
    with _starting:
        return _started(count, threads)


@lru_cache(maxsize=4)
def _started(count: int, threads: int) -> ThreadPoolExecutor:
    own, all_here = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # reads the process's number now; later, this would overwrite the number set below
        all_here.wait()
        torch.set_num_threads(threads)
        all_here.wait()

    pool = ThreadPoolExecutor(count, "relpos")
    try:
        for _ in range(count):
            pool.submit(begin)
        all_here.wait()
        all_here.wait()
    except BaseException:
        all_here.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(own)  # a thread also sets the number of threads that start later
    return pool


def _forget() -> None:
    """Forget the pools in a forked process, which has only the thread that forked."""
    global _starting
    _starting = Lock()
    _started.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
