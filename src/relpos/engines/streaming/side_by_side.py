"""Heads side by side on a CPU: each thread computes some of them by itself.

When all threads share each operation on a tile, they wait for one another at its end, and what one core has written the
other reads. A thread that computes whole heads does neither, and its results do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Barrier

import torch

_TOGETHER = 0.8
"""What threads are worth that share each operation, of what they are worth side by side."""


def workers(shares: int, device: torch.device) -> int:
    """How many threads compute so many equal shares soonest; each has an equal part of PyTorch's threads."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return 1
    return max(range(1, min(shares, threads) + 1), key=lambda count: (_busy(shares, count, threads), count), default=1)


def _busy(shares: int, count: int, threads: int) -> float:
    """The part of all threads' time that is worth something."""
    rounds, each = -(-shares // count), threads // count
    return shares / (rounds * count) * (each * count / threads) * (1 if each == 1 else _TOGETHER)


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Do all works, each in a thread of its own; a single one in the caller's."""
    if len(works) == 1:
        works[0]()
        return
    inference = torch.is_inference_mode_enabled()
    pool = _pool(len(works), torch.get_num_threads() // len(works))
    running = [pool.submit(_without_gradients, work, inference) for work in works]
    errors = [work.exception() for work in running]
    for error in errors:
        if error is not None:
            raise error


def _without_gradients(work: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work()


@lru_cache(maxsize=4)
def _pool(count: int, threads: int) -> ThreadPoolExecutor:
    """A pool of so many threads, each of which has `threads` of PyTorch's."""
    own, started = torch.get_num_threads(), Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "relpos", initializer=partial(_start, threads, started))
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(own)  # what a thread sets is the number of those that begin later, too
    return pool


def _start(threads: int, started: Barrier) -> None:
    torch.set_num_threads(threads)
    started.wait()
