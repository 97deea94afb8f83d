"""The machines of `relpos compare --cluster`: a Dask cluster, or Slurm. Nothing of them is imported without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path

from relpos.comparison.detached import begin, follow, running, start
from relpos.comparison.executors import ClusterExecutor
from relpos.comparison.experiment import Comparison
from relpos.core.checks import fail
from relpos_command.option_groups import ClusterOptions
from relpos_command.requests import CompareCommand

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
    executor.reads_data = not options.send_data
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
    for flag, given in (("--detach", options.detach), ("--send-data", options.send_data)):
        if given and options.cluster is None:
            fail(f"{flag} with --cluster", f"{flag} without it", "Add --cluster, or leave it out.")
    if (options.cluster or "").startswith("tls://") and options.cluster_tls is None:
        fail("--cluster-tls CERT,KEY,CA with a tls:// address", "none", "Name three files, joined by commas.")
    if is_slurm and options.shared is None:
        fail("--shared DIR, a folder that all nodes see", "none", "Name one, such as --shared /scratch/me/relpos.")
    if options.cluster_tls is not None and len(options.cluster_tls) != 3:
        fail("--cluster-tls CERT,KEY,CA", ",".join(options.cluster_tls), "Name three files, joined by commas.")


class Coordinator:
    """Who coordinates the work of a command: this process, or another in the background (`detached`).

    Args:
        options: the command's.
    """

    def __init__(self, options: CompareCommand) -> None:
        self._options = options

    def attach(self, folder: Path, say: Callable[[str], None]) -> bool:
        """Wait for the coordinator in the background of a folder, if there is one, and pass on what it prints.

        Returns:
            Whether this command ends here: with `--detach` it does not wait.
        """
        if other := running(folder):
            say(f"This comparison has a coordinator, {other}. {'' if self._options.detach else 'Its words:'}".rstrip())
            if not self._options.detach:
                follow(folder, say)
        return other is not None and self._options.detach

    def hand_over(self, comparison: Comparison, say: Callable[[str], None]) -> bool:
        """With `--detach` leave the work to others, and say to whom.

        Returns:
            Whether this command ends here.

        Raises:
            ValueError: the coordinator in the background ended at once. One line.
        """
        folder = comparison.store.folder
        if self.attach(folder, say):
            return True
        begin(folder)
        if not self._options.detach or not any(comparison.tasks()):
            return False
        if self._options.cluster == SLURM:
            new, old = comparison.submit()
            submitted = f"Submitted {new} {'job' if new == 1 else 'jobs'}{f', and {old} before' if old else ''}."
            say(f"{submitted} The same command without --detach waits for them and writes the page.")
        else:
            words = [word for word in sys.argv[1:] if word != "--detach"]
            say(start(folder, words if self._options.out is not None else [*words, "--out", str(folder)]))
        return True


def _executor(options: ClusterOptions) -> ClusterExecutor:
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
