"""Work by the workers of a Dask cluster. Dask begins the work of a dead worker on another, three more times by default.

What Dask sends is pickled, in both directions: a cluster is for a private network, or for TLS (docs/scale.md). The
answers of work are bytes all the same (`answer.py`).
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from relpos.comparison.executors import ClusterExecutor, GivenUp
from relpos.comparison.trial import head_of, versions
from relpos.core.checks import fail

_PATIENCE = 60
"""Seconds in which the scheduler must answer, and a first worker be there."""
_PREFIX = "relpos-"
"""Dask's key of a piece of work begins so. Work that is asked for anew while a worker still does it goes on."""


class DaskExecutor(ClusterExecutor):
    """Submits work to a Dask cluster.

    Args:
        address: `tcp://HOST:8786`, or a file that the scheduler wrote (`--scheduler-file`).
        cost_worker: the name, address or host of the worker whose machine measures costs; by default the first.
        tls: files of the certificate, its key, and the authority's certificate.

    Raises:
        ValueError: the cluster does not answer, has no worker, or lacks that worker. One line.
    """

    def __init__(
        self, address: str, *, cost_worker: str | None = None, tls: tuple[str, str, str] | None = None
    ) -> None:
        from distributed import Client, Security

        security = None
        if tls is not None:
            certificate, key, authority = tls
            security = Security(
                tls_ca_file=authority, tls_client_cert=certificate, tls_client_key=key, require_encryption=True
            )
        for name in ("distributed.client", "distributed.core", "distributed.comm"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what happens is told in one line
        where: dict[str, Any] = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
        try:
            self._client = Client(**where, security=security, timeout=_PATIENCE, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            fail("a Dask scheduler that answers", f"{address} ({why})", "Start one: dask scheduler.")
        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE)
        except TimeoutError:
            self._client.close()
            fail("a worker", f"none at {address}", f"Start some: dask worker {address} --nthreads 1.")
        self._left_out: set[str] = set()
        self._shared: tuple[bytes, Any] | None = None
        self.cost_machine = self._machine(cost_worker)

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
        workers = None
        if head["cost"]:
            workers = [self.cost_machine]
        elif self._left_out:
            workers = [address for address in self._workers() if address not in self._left_out]
            if not workers:
                raise GivenUp(f"no worker has the versions of this machine: {', '.join(sorted(self._left_out))}")
        asked = self._client.submit(fn, parcel, self._shared[1], key=_PREFIX + head["key"], workers=workers, retries=0)
        future: Future[Any] = Future()

        def take(done: Any) -> None:
            if future.cancelled():
                return
            if done.status == "finished":
                future.set_result(done.result())
            else:
                error = None if done.status == "cancelled" else done.exception()
                future.set_exception(GivenUp(_line(error)))

        asked.add_done_callback(take)
        future.add_done_callback(lambda one: asked.cancel() if one.cancelled() else asked.release())
        return future

    def leave_out(self, worker: str) -> bool:
        """Send nothing to a worker any more."""
        self._left_out.add(worker)
        return True

    def running(self) -> dict[str, str]:
        """What runs, by its key, and the address of its worker."""
        try:
            found = self._client.processing()
        except Exception:  # the scheduler is away; its absence is told by the futures
            return {}
        return {
            str(key).removeprefix(_PREFIX): str(worker)
            for worker, keys in found.items()
            for key in list(keys)[:1]  # it does them in this order
        }

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which stays."""
        self._client.close()


def _line(error: BaseException | None) -> str:
    if error is None:
        return "its connection to the cluster ended"
    if type(error).__name__ == "KilledWorker":
        return "every worker that it was given died; their logs may say why"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
