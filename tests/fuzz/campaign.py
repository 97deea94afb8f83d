"""Many seeds one after another, in one process or several, and what is said of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator

import torch

import interpreter
from fuzz.description import Described, shown
from fuzz.drawing import draw
from fuzz.running import Outcome, Tally, check
from fuzz.shrinking import shrink


def _one(given: tuple[int, tuple[str, ...]]) -> tuple[int, Outcome]:
    seed, engines = given
    return seed, check(draw(seed, engines), engines)


def _begin(engines: tuple[str, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    if "triton" in engines:
        interpreter.prepare()


def _outcomes(seeds: Iterable[int], engines: tuple[str, ...], jobs: int, threads: int) -> Iterator[tuple[int, Outcome]]:
    given = ((seed, engines) for seed in seeds)
    if jobs == 1:
        _begin(engines, threads)
        yield from map(_one, given)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _begin, (engines, threads)) as pool:
        yield from pool.imap(_one, given, chunksize=20)


def campaign(seeds: range, engines: tuple[str, ...], jobs: int, threads: int, stop: int, shrinking: bool) -> int:
    """Run all of them; 1 where one failed."""
    tally, failing = Tally(), 0
    for seed, outcome in _outcomes(seeds, engines, jobs, threads):
        tally.add(outcome)
        if tally.calls % 1000 == 0:
            print(f"{tally.calls:,} of {len(seeds):,} calls, {failing:,} failing", flush=True)
        if outcome.failures:
            failing += 1
            report(draw(seed, engines), outcome, engines, shrinking)
        if failing >= stop:
            print(f"stopped at {failing} failing calls")
            break
    served = ", ".join(f"{engine} {tally.served[engine]:,}" for engine in engines)
    print(f"{tally.calls:,} calls; served: {served}; failing: {failing:,}")
    for engine, share in tally.worst.items():
        print(f"  {engine}: at most {share:.3f} of what is allowed")
    return 1 if failing else 0


def report(call: Described, outcome: Outcome, engines: tuple[str, ...], shrinking: bool) -> None:
    """Say what failed, and the smallest call that fails in the same engines."""
    print(f"seed {call.seed}: python -m tests.fuzz --engines {','.join(engines)} --seed {call.seed}")
    for engine, wrong in outcome.failures.items():
        print(f"  {engine}: {wrong}")
    if not shrinking:
        print(f"  {shown(call)}", flush=True)
        return
    engine = next(iter(outcome.failures))
    only = (engine,) if engine in engines else engines
    kind = _kind(outcome.failures[engine])

    def fails(other: Described) -> bool:
        found = check(other, only).failures
        return engine in found and _kind(found[engine]) == kind

    smaller = shrink(call, fails)
    print(f"  {engine} still fails on: {check(smaller, only).failures.get(engine)}")
    print(f'  python -m tests.fuzz --engines {",".join(only)} --call "{shown(smaller)}"', flush=True)


def _kind(wrong: str) -> str:
    """What tells one failure from another: an error by its type, a difference by what differs first."""
    if "Traceback" in wrong or "Error" in wrong:
        return wrong.strip().splitlines()[-1].split(":")[0]
    return "NaN" if ": NaN in" in wrong.split(";")[0] else "differs"


def again(call: Described, engines: tuple[str, ...], threads: int, shrinking: bool) -> int:
    """One call, and how it fails."""
    torch.set_num_threads(threads)
    outcome = check(call, engines)
    if outcome.failures:
        report(call, outcome, engines, shrinking)
        return 1
    print(shown(call))
    print(f"agrees in {', '.join(outcome.served) or 'no engine: none serves it'}")
    return 0
