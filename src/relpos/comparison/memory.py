"""Peak memory of a piece of work: the most that the device, or this process, used above the starting level."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

_MIB = 2**20
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for this process instead of giving it back to the system; elsewhere do nothing.

    Every training step frees and allocates the same tensors. If they are given back, each page causes a fault when it
    returns: about 4,000 per step of the digits recipe, a tenth of its time.
    """
    trim_threshold, mmap_threshold = -1, -3  # mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 * _MIB)  # the highest value that every glibc accepts
        libc.mallopt(trim_threshold, 1024 * _MIB)


def _status(field: str) -> int:
    """A field of Linux's /proc/self/status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


class PeakMemory:
    """Memory above the level at construction.

    On a GPU, allocated memory. On Linux, the process's resident size, its high-water mark reset first. Elsewhere the
    high-water mark of the whole process, which is only right if the process never used more before.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        elif _STATUS.exists():
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # freed memory must not count as in use
            with contextlib.suppress(OSError):  # a sandbox may refuse; the peak is then the process's own
                _CLEAR.write_text("5")  # reset VmHWM, see proc(5)
            self.before = _status("VmRSS")
        else:
            self.before = self._highest()

    @staticmethod
    def _highest() -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def mib(self) -> float:
        """The peak so far, in MiB above the level at construction."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _status("VmHWM") if _STATUS.exists() else self._highest()
        return round((peak - self.before) / _MIB, 1)
