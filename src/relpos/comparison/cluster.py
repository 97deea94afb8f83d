"""The machines of `relpos compare --cluster`: a Dask cluster, or Slurm. Nothing of them is imported without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from relpos.core.checks import fail
from relpos_command.option_groups import ClusterOptions

SLURM = "slurm"


@contextmanager
def executor_of(options: ClusterOptions) -> Iterator[Executor | None]:
    """The executor of the options of the command, while it is used; None without `--cluster`.

    Raises:
        ValueError: an option lacks another, a package is missing, or the cluster does not answer. One line.
    """
    require_options(options)
    if options.cluster is None:
        yield None
        return
    executor = _executor(options)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False)


def require_options(options: ClusterOptions) -> None:
    """Raise unless the options fit each other."""
    is_slurm = options.cluster == SLURM
    for flag, value, suits, needs in (
        ("--cost-worker", options.cost_worker, options.cluster is not None, "--cluster"),
        ("--cluster-tls", options.cluster_tls, options.cluster is not None and not is_slurm, "--cluster tls://..."),
        ("--slurm", options.slurm, is_slurm, "--cluster slurm"),
        ("--shared", options.shared, is_slurm, "--cluster slurm"),
    ):
        if value is not None and not suits:
            fail(f"{flag} with {needs}", f"{flag} without it", f"Add {needs}, or leave it out.")
    if (options.cluster or "").startswith("tls://") and options.cluster_tls is None:
        fail("--cluster-tls CERT,KEY,CA with a tls:// address", "none", "Name three files, joined by commas.")
    if is_slurm and options.shared is None:
        fail("--shared DIR, a folder that all nodes see", "none", "Name one, such as --shared /scratch/me/relpos.")
    if options.cluster_tls is not None and len(options.cluster_tls) != 3:
        fail("--cluster-tls CERT,KEY,CA", ",".join(options.cluster_tls), "Name three files, joined by commas.")


def _executor(options: ClusterOptions) -> Executor:
    try:
        if options.cluster == SLURM:
            from relpos.comparison.slurm_jobs import SlurmExecutor

            assert options.shared is not None
            return SlurmExecutor(Path(options.shared), dict(options.slurm or {}), cost_node=options.cost_worker)
        from relpos.comparison.dask_workers import DaskExecutor

        tls = None if options.cluster_tls is None else (*options.cluster_tls,)
        assert options.cluster is not None
        return DaskExecutor(options.cluster, cost_worker=options.cost_worker, tls=tls)  # type: ignore[arg-type]
    except ImportError as error:
        fail("the packages of a cluster", f"no {error.name}", "Install them: pip install 'relpos[cluster]'.")
