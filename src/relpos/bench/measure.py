"""Time, with peers interleaved round by round, and peak memory, with each peer in a separate process.

Each peer runs once per round, and the order rotates from round to round. Ratios are computed within a round, so that a
machine that slows down affects both times. The functions here run in worker processes: plain values in and out.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from relpos.bench.cases import Case
from relpos.bench.check import faults, first_line
from relpos.bench.inputs import make
from relpos.bench.modules import baseline, peers_of
from relpos.bench.peers import Peer, Workload, is_small
from relpos.comparison.memory import PeakMemory

_GIB = 2**30
_SHARE = 0.7
_LONG = 8192
_SHORT, _MORE, _MANY = 512, 3, 40
_BUSY_CYCLES = 20_000_000  # about 10 ms on a GPU, longer than any launch
_WARM_TOKENS = 64


def rounds_of(case: Case, repeats: int) -> tuple[int, int]:
    """The numbers of warm-up rounds and of timed rounds: fewer if a round takes many seconds, more if it is short."""
    if repeats == 1:
        return 1, 1
    if case.device == "cuda":
        return _MORE, repeats * _MORE
    if is_small(case):
        return 10, repeats * _MANY
    if case.count >= _LONG:
        return 1, min(repeats, 3)
    return 2, repeats * _MORE if case.count <= _SHORT else repeats


def quartiles(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return dict.fromkeys(("median", "q1", "q3"), round(values[0], digits))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, digits), "q1": round(low, digits), "q3": round(high, digits)}


def _available(case: Case) -> int | None:
    """Free bytes of memory on the case's device; None if the system does not report them."""
    if case.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def lacks_room(peer: Peer, case: Case, available: int | None) -> str | None:
    """Why a peer is not tried: it needs more memory than is free. Else None."""
    wanted = peer.needs(case)
    if available is None or wanted <= _SHARE * available:
        return None
    return f"not tried: needs about {wanted / _GIB:.0f} GiB, {available / _GIB:.0f} GiB are free"


def unable(peer: Peer, case: Case, available: int | None) -> str | None:
    """Why a peer cannot run a case here, or None."""
    missing = None if peer.missing is None else peer.missing()
    return missing or lacks_room(peer, case, available)


def _elapsed(work: Workload, device: str) -> float:
    """Milliseconds. On a GPU, between two events on its stream, queued behind work that outlasts the call's launch."""
    if device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def interleaved(
    works: dict[str, Workload], warm: int, rounds: int, device: str = "cpu"
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds by name, for each round; and reasons for those that failed."""
    milliseconds: dict[str, list[float]] = {name: [] for name in works}
    reasons: dict[str, str] = {}
    for number in range(warm + rounds):
        names = [name for name in works if name not in reasons]
        turn = number % max(1, len(names))
        for name in [*names[turn:], *names[:turn]]:
            try:
                elapsed = _elapsed(works[name], device)
            except Exception as error:  # out of memory, or a failing compiler: others continue
                reasons[name] = first_line(error)
                continue
            if number >= warm:
                milliseconds[name].append(elapsed)
    return milliseconds, reasons


def time_case(
    case: Case, engines: tuple[str, ...], repeats: int, threads: int, report: Callable[[str], None],
    leave_out: tuple[str, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """The entries of a case: peers are checked, then the green ones timed. On CPU, memory is measured separately, in
    other processes.

    Args:
        leave_out: names of peers to skip.
    """
    torch.set_num_threads(threads)
    report("checking")
    peers = [peer for peer in peers_of(case, engines) if peer.name not in leave_out]
    available = _available(case)
    reasons = {peer.name: reason for peer in peers if (reason := unable(peer, case, available))}
    reasons |= faults(case, [peer for peer in peers if peer.name not in reasons], engines)
    report("timing")
    inputs = make(case)
    works: dict[str, Workload] = {}
    for peer in peers:
        if peer.name in reasons:
            continue
        try:
            works[peer.name] = peer.build(inputs)
        except Exception as error:
            reasons[peer.name] = first_line(error)
    gc.collect()
    milliseconds, failed = interleaved(works, *rounds_of(case, repeats), case.device)
    reasons |= failed
    against = baseline(case)
    base = milliseconds.get(against, []) if against not in reasons else []
    entries = [
        _entry(case, peer, works.get(peer.name), milliseconds.get(peer.name, []), base, reasons.get(peer.name))
        for peer in peers
    ]
    if case.device == "cuda":  # PyTorch counts the memory of each work
        report("memory")
        for entry in entries:
            if entry["reason"] is None:
                entry["extra_mib"] = _extra_mib(works[entry["peer"]], case.device)
    return entries


def _entry(
    case: Case, peer: Peer, work: Workload | None, times: list[float], base: list[float], reason: str | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "case": case.name,
        "peer": peer.name,
        "title": peer.title,
        "backend": None if work is None else work.backend,
        "ms": None,
        "ratio": None,
        "against": baseline(case),
        "rounds_ms": [],
        "extra_mib": None,
        "reason": reason,
    }
    if reason is None:
        entry["rounds_ms"] = [round(value, 4) for value in times]
        entry["ms"] = quartiles(times, 3)
        if base:
            entry["ratio"] = quartiles([a / b for a, b in zip(times, base, strict=True)], 3)
    return entry


def memory_of(case: Case, name: str, engines: tuple[str, ...], threads: int) -> float | str:
    """Extra memory of one peer in MiB, or the reason why there is none: peak resident size minus that with inputs.

    Call it in a fresh process. A library is warmed up on a tiny case. A compiler is warmed up on the case itself,
    because its own memory does not belong to the kernel.
    """
    torch.set_num_threads(threads)
    (peer,) = (peer for peer in peers_of(case, engines) if peer.name == name)
    lacking = lacks_room(peer, case, _available(case))
    if lacking is not None:
        return lacking
    try:
        if not peer.compiles:
            peer.build(make(case.shrunk(_WARM_TOKENS)))()
        work = peer.build(make(case))
        if peer.compiles:
            work()
        return _extra_mib(work, case.device)
    except Exception as error:
        return first_line(error)


def ceilings(report: Callable[[str], None]) -> dict[str, float]:
    """The GPU's limits: TFLOP/s of a large bfloat16 matrix product, GB/s of a large copy (reads plus writes)."""
    report("product and copy")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    works = {"product": Workload(lambda: a @ b), "copy": Workload(lambda: target.copy_(source))}
    milliseconds, _ = interleaved(works, _MORE, 7 * _MORE, "cuda")
    product, copy = (statistics.median(milliseconds[name]) / 1e3 for name in works)
    return {"tflop_a_second": round(2 * 8192**3 / product / 1e12, 1), "gb_a_second": round(2 * 2**30 / copy / 1e9, 1)}


def _extra_mib(work: Workload, device: str) -> float:
    memory = PeakMemory(torch.device(device))
    work()
    return memory.mib()
