"""Work on other machines: what their executor must be, which versions they need, and what machine measures costs."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from relpos.adapters.library_models import LibraryModel
from relpos.comparison.answer import WorkerAnswer
from relpos.comparison.executors import ClusterExecutor, run_on
from relpos.comparison.settings import environment
from relpos.comparison.trial import parcel_of, versions
from relpos.comparison.workers import WorkerTask
from relpos.core.checks import fail, shape_of
from relpos.files.reading import FileError
from relpos.results import Environment, plain
from relpos.results.typed import typed
from relpos.train import Procedure, resolve_device


def require_executor(executor: object) -> None:
    """Raise unless work can be submitted."""
    if not isinstance(executor, Executor):
        fail("executor to be a concurrent.futures.Executor", shape_of(executor), "Leave it out for this machine.")


def wanted_versions(procedure: Procedure) -> dict[str, str]:
    """The versions that every worker must have, as here: relpos, torch and the library of the model."""
    build = procedure.build
    return versions((build.package,) if isinstance(build, LibraryModel) else ())


def parcel_for(
    task: WorkerTask,
    comparison: Any,
    procedure: Procedure,
    *,
    cost: bool,
    folder: Path | None = None,
    within: str | None = None,
    model: str | None = None,
    device: str = "cpu",
) -> bytes:
    """What is sent for a task.

    Args:
        comparison: JSON values that tell this comparison from others. cost: whether the task measures time or memory.
        folder: as in `parcel_of`. within: the folder in it whose files come back.
        model: a library's model as it describes itself here, with a fingerprint of its files.
        device: the worker's, whose name comes back.
    """
    wanted = wanted_versions(procedure)
    key = hashlib.sha256(json.dumps([comparison, wanted, task.name], sort_keys=True).encode()).hexdigest()
    head = {"key": key, "versions": wanted, "cost": cost, "alone": task.name == "timing", "folder": within}
    head |= {"device": device, "name": task.name}
    build = procedure.build
    if isinstance(build, LibraryModel) and model is not None:
        head["model"] = [build.name, model]
    return parcel_of(task, head, folder)


def machine_of(executor: Executor, device: str, procedure: Procedure) -> tuple[str, Environment]:
    """The device of a name, and the environment, of the machine that measures costs.

    Raises:
        ValueError: it has other versions, no such device, or did not answer.
    """
    task = WorkerTask("environment", _machine, (device,))
    found: list[tuple[str, Environment]] = []

    def accept(_: WorkerTask, answer: WorkerAnswer) -> None:
        record = answer.record
        if not isinstance(record, dict) or not isinstance(record.get("device"), str):
            raise FileError("it names no device")
        found.append((record["device"], typed(Environment, record.get("environment"), "environment")))

    asked = [device, executor.machines if isinstance(executor, ClusterExecutor) else ""]

    def parcel(one: WorkerTask) -> bytes:
        return parcel_for(one, asked, procedure, cost=True)

    if isinstance(executor, ClusterExecutor):
        executor.require_versions(wanted_versions(procedure))
    for event in run_on(executor, [task], parcel, b"", accept, keep=True):
        if event.kind == "failed":
            raise ValueError(event.value.strip().splitlines()[-1].removeprefix("ValueError: "))
    return found[0]


def _machine(device: str) -> dict[str, Any]:
    resolved = str(resolve_device(device))
    return {"device": resolved, "environment": plain(environment(resolved))}
