"""Work by the workers of a Dask cluster, which begins the work of a dead worker on another: here at most twice.

What Dask sends to workers is pickled, and so are errors that come back: a cluster is for a private network, or for TLS
(docs/scale.md). The answers of work are bytes (`answer.py`), and results that are pickled are not read.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relpos.comparison.executors import TRIES, ClusterExecutor, GivenUp
from relpos.comparison.trial import TOPIC, head_of, versions
from relpos.core.checks import fail
from relpos.files.reading import MIB, FileError, read_json

_PATIENCE = 60
"""Seconds in which the scheduler must answer, and a first worker be there."""
_AT_ONCE = 4
"""Answers that are fetched at once: Dask waits for one whose worker has died until it is made again."""
_NOT_PICKLED = ["dask", "msgpack"]
"""Of Dask's ways to send a result; trials answer bytes."""
_PREFIX = "relpos-"
"""Dask's key of a piece of work begins so. Work that is asked for anew while a worker still does it goes on."""


class DaskExecutor(ClusterExecutor):
    """Submits work to a Dask cluster.

    Args:
        address: `tcp://HOST:8786`, or a file that the scheduler wrote (`--scheduler-file`).
        cost_worker: the name, address or host of the worker whose machine measures costs; by default the first.
        tls: files of the certificate, its key, and the authority's certificate.

    Raises:
        ValueError: the cluster does not answer, has no worker, or lacks that worker; a file is missing. One line.
    """

    def __init__(
        self, address: str, *, cost_worker: str | None = None, tls: tuple[str, str, str] | None = None
    ) -> None:
        from distributed import Client, Security

        address, security = _address(address), None
        if tls is not None:
            if not address.startswith("tls://"):
                fail("--cluster tls://HOST:8786 with --cluster-tls", address, "Correct one of them.")
            certificate, key, authority = tls
            if missing := [file for file in tls if not Path(file).is_file()]:
                fail("--cluster-tls CERT,KEY,CA, three files", f"no file {missing[0]}", "Correct its path.")
            security = Security(
                tls_ca_file=authority, tls_client_cert=certificate, tls_client_key=key, require_encryption=True
            )
        for name in ("distributed.client", "distributed.core", "distributed.comm"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what happens is told in one line
        try:
            self._client = Client(
                address, security=security, timeout=_PATIENCE, set_as_default=False, deserializers=_NOT_PICKLED
            )
        except (OSError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            fail("a Dask scheduler that answers", f"{address} ({why})", "Start one: dask scheduler.")
        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError:
            self._client.close()
            fail("a worker", f"none at {address}", f"Start some: dask worker {address} --nthreads 1.")
        self._left_out: dict[str, str] = {}
        self._avoided: dict[str, set[str]] = {}
        self._lock, self._fetching = threading.Lock(), ThreadPoolExecutor(_AT_ONCE)
        self._begun: dict[str, list[str]] = {}
        self._said: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, Future[Any]]] = {}
        self._client.subscribe_topic(TOPIC, self._hear)
        self._shared: tuple[bytes, Any] | None = None
        self._costs: set[str] = set()
        self._cost_seen = time.monotonic()
        self.cost_machine = self._machine(cost_worker)

    def _hear(self, event: Any) -> None:
        """A word of a trial, perhaps one of another coordinator."""
        told = event[1] if isinstance(event, tuple | list) and len(event) == 2 else None
        told = told if isinstance(told, dict) else {}
        key, worker = told.get("key"), told.get("worker")
        with self._lock:
            if not isinstance(key, str) or not isinstance(worker, str) or key not in self._asked:
                return
            if told.get("said") is None:
                self._begun[key].append(worker)
            else:
                self._said[key] = told["said"]

    def _workers(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return found

    def _machine(self, name: str | None) -> str:
        """The host of a worker."""
        workers = self._workers()
        for address, worker in workers.items():
            if name is None or name in (address, str(worker["name"]), worker["host"]):
                return str(worker["host"])
        known = ", ".join(f"{worker['name']} ({address})" for address, worker in list(workers.items())[:8])
        fail("the name, address or host of a worker", f"--cost-worker {name}", f"The workers are {known}.")

    def require_versions(self, wanted: dict[str, str]) -> None:
        """Raise unless every worker that is there has these versions; the line names those that have not.

        Raises:
            ValueError: one has others, or lacks relpos.
        """
        packages = tuple(wanted.keys() - {"relpos", "torch"})
        found = self._client.run(versions, packages, on_error="return")
        for address, here in found.items():
            if isinstance(here, OSError):  # it has just died; one that is only out of reach refuses by itself
                continue
            if not isinstance(here, dict):
                here = {**wanted, "relpos": f"none ({here})"}
            odd = [name for name in wanted if here.get(name) != wanted[name]]
            if odd:
                expected, got = (", ".join(f"{x} {which.get(x, 'none')}" for x in odd) for which in (wanted, here))
                fail(f"{expected} on every worker", f"{got} on {address}", "Install the same there, or stop it.")

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        """Submit `fn(parcel, shared)`, which is `trial`."""
        parcel, shared = args
        head = head_of(parcel)
        if self._shared is None or self._shared[0] is not shared:  # sent once, then from worker to worker
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a large graph: unlike scattered data, it outlives every worker
                key = f"{_PREFIX}shared-{hashlib.sha256(shared).hexdigest()}"
                self._shared = (shared, self._client.submit(bytes, shared, key=key))
        workers = self._suited(head)
        asked = self._client.submit(
            fn,
            parcel,
            self._shared[1],
            key=_PREFIX + head["key"],
            workers=workers,
            allow_other_workers=workers is not None and not head["cost"],  # these may all end; one left out refuses
            retries=0,
        )
        future: Future[Any] = Future()
        with self._lock:
            self._asked[head["key"]], self._begun[head["key"]] = (asked, future), []
            if head["cost"]:
                self._costs.add(head["key"])

        def fetch(done: Any) -> None:
            try:
                self._end(future, done.result())
            except Exception as unread:  # it is no answer, or cannot be had
                self._end(future, RuntimeError(_line(unread)))

        def take(done: Any) -> None:
            if future.done():
                return
            if done.status == "finished":
                self._fetching.submit(fetch, done)
            else:
                error = None if done.status == "cancelled" else done.exception()
                self._end(future, self._error(head["key"], error))

        asked.add_done_callback(take)
        future.add_done_callback(lambda one: asked.cancel() if one.cancelled() else asked.release())
        return future

    def _suited(self, head: dict[str, Any]) -> list[str] | None:
        """The workers that may do some work; None for all.

        Raises:
            GivenUp: there are none.
        """
        if head["cost"]:
            return [self.cost_machine]
        avoided = self._avoided.get(head["key"], set())
        if not self._left_out and not avoided:
            return None
        usable = [address for address in self._workers() if address not in self._left_out]
        if not usable:
            raise GivenUp(f"every worker refuses: {'; '.join(self._left_out.values())}")
        return [address for address in usable if address not in avoided] or usable

    def _end(self, future: Future[Any], outcome: Any) -> None:
        with self._lock:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _error(self, key: str, error: BaseException | None) -> Exception:
        """What ends a future without an answer; work whose worker died is tried on others, `TRIES` times in all."""
        if type(error).__name__ == "KilledWorker":
            begun = self._begun.get(key, [])
            return RuntimeError("its worker died") if len(begun) < TRIES else _died(begun)
        return GivenUp(_line(error))

    def avoid(self, key: str, worker: str) -> None:
        """Try work on another worker next, if there is one."""
        self._avoided.setdefault(key, set()).add(worker)

    def said(self) -> dict[str, Any]:
        """What trials said since the last call."""
        with self._lock:
            said, self._said = self._said, {}
        return said

    def forget(self, key: str) -> None:
        """Drop what is known of work that is stored."""
        with self._lock:
            for known in (self._asked, self._begun, self._said, self._avoided):
                known.pop(key, None)
            self._costs.discard(key)

    def _give_up(self, workers: set[str]) -> None:
        """End work that lost `TRIES` workers, by now Dask may have begun it on another, and work that has none."""
        if any(urlsplit(worker).hostname == self.cost_machine for worker in workers):
            self._cost_seen = time.monotonic()
        is_gone = time.monotonic() - self._cost_seen > _PATIENCE
        with self._lock:
            known = [(key, *self._asked[key], begun) for key, begun in self._begun.items() if key in self._asked]
        for key, asked, future, begun in known:
            if is_gone and key in self._costs and not future.done():
                why = f"no worker on {self.cost_machine}, which measures time and memory"
                self._end(future, GivenUp(f"{why}; start one there, or name another of its kind: --cost-worker"))
                asked.cancel()
            last_too = len(begun) == TRIES and begun[-1] not in workers
            if (len(begun) > TRIES or last_too) and not future.done():
                self._end(future, _died(begun))
                asked.cancel()

    def leave_out(self, worker: str, why: str) -> bool:
        """Send nothing to a worker any more."""
        self._left_out[worker] = why
        return True

    def running(self) -> dict[str, str]:
        """What runs, by its key, and the address of its worker."""
        try:
            found = self._client.processing()
        except Exception:  # the scheduler is away; its absence is told by the futures
            return {}
        self._give_up({str(worker) for worker in found})
        return {
            str(key).removeprefix(_PREFIX): str(worker)
            for worker, keys in found.items()
            for key in list(keys)[:1]  # it does them in this order
        }

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which stays."""
        self._client.close()
        self._fetching.shutdown(wait=False, cancel_futures=True)


def _address(given: str) -> str:
    """The address of a scheduler, which a file may hold."""
    if not Path(given).is_file():
        return given
    try:
        address = read_json(Path(given), MIB)["address"]
    except (FileError, KeyError, TypeError):
        address = None
    if not isinstance(address, str):
        fail("a Dask scheduler's file", f"{given}, which has no address", "Name what --scheduler-file wrote.")
    return address


def _died(workers: list[str]) -> GivenUp:
    return GivenUp(f"every worker that it was given died: {', '.join(workers[:TRIES])}")


def _line(error: BaseException | None) -> str:
    if error is None:
        return "its connection to the cluster ended"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
