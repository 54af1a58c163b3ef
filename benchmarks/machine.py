"""The machine that a benchmark ran on: figures mean nothing without it."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interpreters import installed_version
from quorate.observe.quantities import size

BUSY = 0.25
"""Processes that want to run, for each core, before the benchmark has begun: more than that is noise."""


@dataclass(frozen=True)
class Machine:
    """What the figures depend on; `load` is the average number of running processes in the minute before."""

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    quorate: str
    load: float

    @classmethod
    def here(cls) -> "Machine":
        """This one, now. Cores are those that this process may use."""
        return cls(
            processor=processor_name(_read("/proc/cpuinfo")),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=platform.release(),
            python=platform.python_version(),
            torch=installed_version("torch"),
            quorate=installed_version("quorate"),
            load=round(os.getloadavg()[0], 2),
        )

    @property
    def sentence(self) -> str:
        """In one line."""
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        return (
            f"{cores} ({self.processor}), {size(self.memory_bytes)}, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}, Quorate {self.quorate}"
        )

    @property
    def warning(self) -> str:
        """What to keep in mind about the figures; empty on a quiet machine."""
        if self.load <= BUSY * self.cores:
            return ""
        return (
            f"The machine was busy before the benchmark began (load {self.load:g} on {self.cores} cores): "
            "trust the ratios more than the milliseconds, and neither much."
        )


def processor_name(cpuinfo: str) -> str:
    """The name that the kernel tells, or the architecture where it tells none, as on ARM."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
