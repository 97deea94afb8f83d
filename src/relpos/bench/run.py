"""A benchmark in a folder. For each case, one process checks and times; then one process per peer measures memory.

Processes run one at a time. The folder works like that of `relpos.comparison`: finished pieces are kept, the same
command resumes, and a folder with other settings, another machine or another version of the engines' source is not
changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import relpos
from relpos.bench.cases import GPU_LENGTHS, LENGTHS, Case, families, gpu_families
from relpos.bench.measure import ceilings, memory_of, time_case
from relpos.bench.modules import peers_of
from relpos.bench.peers import ROOFLINE, all_engines, engines_here
from relpos.bench.targets import judge, memory_fits
from relpos.comparison.settings import environment
from relpos.comparison.store import Store
from relpos.comparison.workers import Event, WorkerError, WorkerTask, run_tasks
from relpos.core.checks import fail, require_int, require_name
from relpos.files.writing import write_json

QUICK_TOKENS = 256
CEILINGS = "ceilings"
_PARTS = ("bench", "core", "engines", "layers", "patterns", "position")


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a benchmark.

    Attributes:
        cases: the cases in order. engines: relpos's engines; None for `auto`, and for cases with many windows or short
            sequences all engines.
        repeats: timed rounds. threads: CPU threads. memory: whether to measure memory.
        quick: cases were shrunk and one round counts.
    """

    cases: tuple[Case, ...]
    engines: tuple[str, ...] | None = None
    repeats: int = 7
    threads: int = 1
    memory: bool = True
    quick: bool = False

    def __post_init__(self) -> None:
        if not self.cases:
            fail("at least one case", "none", "Name some; relpos bench --list prints them.")
        if self.engines is not None and not self.engines:
            fail("at least one engine", "none", "Name some, e.g. --engines auto,streaming.")
        for engine in self.engines or ():
            require_name(engine, all_engines(), "an engine")
        devices = {case.device for case in self.cases}
        if len(devices) > 1:
            fail("cases of one device", " and ".join(sorted(devices)), "Run them in two commands.")
        if self.device == "cuda" and not torch.cuda.is_available():
            fail("a CUDA device for these cases", "none", "Leave out the cases whose name ends in cuda.")
        require_int(self.repeats, "repeats", at_least=1)
        require_int(self.threads, "threads", at_least=1)

    @property
    def device(self) -> str:
        """The device of all cases."""
        return self.cases[0].device

    @classmethod
    def make(
        cls,
        cases: tuple[Case, ...],
        engines: tuple[str, ...] | None = None,
        repeats: int = 7,
        *,
        threads: int | None = None,
        memory: bool = True,
        quick: bool = False,
    ) -> BenchSettings:
        """Settings from the user's options: `quick` shrinks the cases, `threads` defaults to PyTorch's own."""
        if quick:
            cases, repeats = tuple(dict.fromkeys(case.shrunk(QUICK_TOKENS) for case in cases)), 1
        return cls(cases, engines, repeats, torch.get_num_threads() if threads is None else threads, memory, quick)

    def engines_of(self, case: Case) -> tuple[str, ...]:
        """The engines that run a case."""
        if self.engines is not None:
            return self.engines
        borders = families()["windows"] + gpu_families()["gpu-windows"] + gpu_families()["gpu-short"]
        return engines_here(case.device) if case in borders else ("auto",)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with a fingerprint of the measured source."""
        others = {name: value for name, value in asdict(self).items() if name != "cases"}
        return {**others, "cases": [case.name for case in self.cases], "source": fingerprint()}


def fingerprint() -> str:
    """Eight hexadecimal digits that change with the measured source."""
    root = Path(relpos.__file__).parent
    digest = hashlib.sha256()
    for part in _PARTS:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def surroundings(device: str) -> dict[str, Any]:
    """Versions and hardware, with the peers' versions."""
    versions: dict[str, Any] = asdict(environment(device))
    for name in ("transformers", "timm", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    if device == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return {**versions, "capability": torch.backends.cpu.get_cpu_capability()}


def _driver() -> str | None:
    """The version of NVIDIA's driver; None without its tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        versions = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return versions[0] if versions else None


def _memory_name(case: Case, peer: str) -> str:
    return f"memory--{case.name}--{peer}"


class Bench:
    """A benchmark in a folder. The constructor opens the folder, or raises an error that says why it cannot.

    Raises:
        OtherSettingsError: the folder belongs to another benchmark, or holds something else.
    """

    def __init__(self, settings: BenchSettings, folder: Path) -> None:
        self.settings = settings
        self.store = Store(folder, settings.to_json(), surroundings(settings.device))

    def tasks(self, case: Case) -> list[WorkerTask]:
        """The unfinished work of a case: time first."""
        settings, engines = self.settings, self.settings.engines_of(case)
        label = f"time {case.name}"
        timing = (case, engines, settings.repeats, settings.threads)
        work = [WorkerTask(f"time--{case.name}", time_case, timing, True, label=label)]
        for peer in peers_of(case, engines) if settings.memory and case.device == "cpu" else ():
            if peer.name != ROOFLINE:
                arguments = (case, peer.name, engines, settings.threads)
                label = f"measure memory of {case.name}, {peer.title}"
                work.append(WorkerTask(_memory_name(case, peer.name), memory_of, arguments, label=label))
        return [task for task in work if not self.store.finished(task.name)]

    def run(self, watch: Callable[[Event], None] | None = None) -> dict[str, Any]:
        """Do the remaining work and return the results; peers that are red or not tried get no memory measurement."""
        if self.settings.device == "cuda" and not self.store.has(CEILINGS):
            self._do(WorkerTask(CEILINGS, ceilings, ()), watch)
        for case in self.settings.cases:
            for task in self.tasks(case):
                self._do(task, watch)
        return self._write()

    def _do(self, task: WorkerTask, watch: Callable[[Event], None] | None) -> None:
        result: Any = None
        if task.function is memory_of and self._reason(task) is not None:
            events = iter([Event(task, "started"), Event(task, "finished", self._reason(task))])
        else:
            events = run_tasks([task], 1)
        try:
            for event in events:
                result = event.value if event.kind == "finished" else result
                if event.kind == "finished":
                    self.store.add(task.name, result)
                    self._write()
                if watch is not None:
                    watch(event)
        except WorkerError as error:
            if "the process ended" not in str(error):
                raise
            self.store.add(task.name, self._killed(task))  # probably out of memory: continue with the others
            if watch is not None:
                watch(Event(task, "finished"))

    def _killed(self, task: WorkerTask) -> Any:
        reason = "the process was killed, most likely because memory ran out"
        if task.function is memory_of:
            return reason
        case, engines = task.arguments[:2]
        return [
            {"case": case.name, "peer": peer.name, "title": peer.title, "backend": None, "ms": None, "ratio": None,
             "against": None, "rounds_ms": [], "extra_mib": None, "reason": reason}
            for peer in peers_of(case, engines)
        ]  # fmt: skip

    def _reason(self, task: WorkerTask) -> str | None:
        """Why a peer has no time, and therefore no memory measurement."""
        case, peer = task.arguments[:2]
        entries = self.store.get(f"time--{case.name}")
        return next((entry["reason"] for entry in entries if entry["peer"] == peer), None)

    def entries(self) -> list[dict[str, Any]]:
        """All measurements so far, case by case."""
        entries: list[dict[str, Any]] = []
        for case in self.settings.cases:
            if not self.store.has(f"time--{case.name}"):
                continue
            for entry in self.store.get(f"time--{case.name}"):
                name = _memory_name(case, entry["peer"])
                memory = self.store.get(name) if self.store.has(name) else entry["extra_mib"]
                if isinstance(memory, str):
                    entry["reason"] = entry["reason"] or f"memory: {memory}"
                else:
                    entry["extra_mib"] = memory
                entries.append(entry)
        return entries

    def results(self) -> dict[str, Any]:
        """All finished work so far."""
        entries, engines = self.entries(), self.settings.engines
        engine = "auto" if engines is None or "auto" in engines else engines[0]
        return {
            **self.store.head,
            "cases": {case.name: asdict(case) for case in self.settings.cases},
            "entries": entries,
            "ceilings": self.store.get(CEILINGS) if self.store.has(CEILINGS) else None,
            "targets": judge(entries, engine),
            "memory_fits": memory_fits(entries, sorted({*LENGTHS, *GPU_LENGTHS})),
        }

    def _write(self) -> dict[str, Any]:
        results = self.results()
        write_json(self.store.folder / "results.json", results, indent=1)
        return results
