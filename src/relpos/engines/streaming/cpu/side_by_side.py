"""Heads side by side on a CPU: each thread computes some of them by itself.

When all threads share each operation on a tile, they wait for one another at its end, and what one core has written the
other reads. A thread that computes whole heads does neither. Where every such thread has one of PyTorch's, what it
computes does not depend on how many there are. In native bfloat16 it is no faster, and not done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock

import torch

from relpos.engines.call import Call

_TOGETHER = 0.8
"""What threads are worth that share each operation, of what they are worth side by side."""
_LEAST = 2**23
"""The scores of a thread for which it pays to wake it: 1,449 tokens and 8 heads for two threads. PyTorch's own threads
look for work for 5 ms after each operation and take a core meanwhile."""
_starting = Lock()


def workers(call: Call, shares: int) -> int:
    """How many threads compute so many equal shares soonest; each has an equal part of PyTorch's threads."""
    threads = torch.get_num_threads()
    if call.q.device.type != "cpu" or threads == 1:
        return 1
    batch, heads, n, _ = call.q.shape
    most = min(shares, threads, batch * heads * n * call.k.shape[2] // _LEAST)
    if hasattr(os, "sched_getaffinity"):  # a thread starts on the cores of its starter, which OpenMP may have bound
        most = min(most, len(os.sched_getaffinity(0)))
    return max(range(1, most + 1), key=lambda count: (_busy(shares, count, threads), count), default=1)


def _busy(shares: int, count: int, threads: int) -> float:
    """The part of all threads' time that is worth something."""
    rounds, each = -(-shares // count), threads // count
    return shares / (rounds * count) * (each * count / threads) * (1 if each == 1 else _TOGETHER)


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Do all works, each in a thread of its own; a single one in the caller's, and those for which no thread is to be
    had: the machine has no more, or the interpreter is ending."""
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
        except RuntimeError:  # from `_pool` and `submit` alone; what a work raises stays in its future
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
    """A pool of so many threads, each of which has `threads` of PyTorch's."""
    with _starting:
        return _started(count, threads)


@lru_cache(maxsize=4)
def _started(count: int, threads: int) -> ThreadPoolExecutor:
    own, all_here = torch.get_num_threads(), Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # reads the number of the process, which it would later, over what is set now
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
        torch.set_num_threads(own)  # a thread sets the number of those that begin later, too
    return pool


def _forget() -> None:
    """In a forked process, which has no threads but the one that forked."""
    global _starting
    _starting = Lock()
    _started.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
