"""Peak memory of a stretch of work: the process's resident set on CPU, the allocator's peak on CUDA."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import psutil
import torch


class PeakMemory:
    """Context manager; afterwards ``start_bytes`` and ``peak_bytes`` say what the gauge showed before and at most.

    On Linux the kernel keeps the peak (VmHWM, reset through /proc/self/clear_refs, proc(5)); elsewhere a thread
    looks ten times a second. On CUDA it is torch's max_memory_allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_bytes = self.peak_bytes = 0
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.start_bytes = torch.cuda.memory_allocated(self._device)
            return self
        self.start_bytes = psutil.Process().memory_info().rss
        if not _reset_kernel_peak():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._watcher is None:
            self.peak_bytes = _kernel_peak()
        else:
            self._stop.set()
            self._watcher.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, process.memory_info().rss)


def _reset_kernel_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return Path("/proc/self/status").exists()


def _kernel_peak() -> int:
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
