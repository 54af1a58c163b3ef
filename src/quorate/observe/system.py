"""What a worker, its machine and the GPUs of it use: read now and then on a thread of its own, and published.

Imported only where a job is tracked, since it needs psutil.
"""

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from quorate.core.machine import free_memory, read_limits
from quorate.observe.event import DeviceMemoryUse, Event
from quorate.observe.seldom_events import GpuLoad, MachineLoad, SystemSampled

log = logging.getLogger(__name__)

FIRST_AFTER = 1.0
"""Seconds before the first sample, so that a short job has one, too. A percentage needs a while to be one of."""
_PATIENCE = 1.0
_LOOPBACK = "lo"
_NO_LIMIT = 2**63


class SystemMonitor:
    """Publishes a sample every so many seconds, from `start` to `close`; whatever fails, training goes on.

    `for_host` says whether this worker is the one that tells of its machine, `device_memory` what it has used of its
    GPU's since it was last asked.
    """

    def __init__(
        self,
        worker: int,
        folder: Path,
        every: float,
        publish: Callable[[Event], None],
        step: Callable[[], int],
        for_host: Callable[[], bool],
        device_memory: Callable[[], DeviceMemoryUse | None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._every = every
        self._publish = publish
        self._step = step
        self._for_host = for_host
        self._device_memory = device_memory
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="system monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_PATIENCE)  # a disk that does not answer holds no job up

    def _watch(self) -> None:
        reading, pause, has_failed = None, 0.0, False
        while not self._closing.wait(pause):
            pause = self._every
            try:
                if reading is None:
                    reading, pause = SystemReading(self._folder), min(FIRST_AFTER, self._every)
                else:
                    used = self._device_memory()
                    self._publish(reading.sample(self._worker, self._step(), used, for_host=self._for_host()))
            except Exception:
                # Said once, and tried again: a machine that is short of something now may not be later.
                if not has_failed:
                    log.exception("the load of this machine cannot be measured now. Training continues.")
                has_failed = True


class SystemReading:
    """Reads it. To be made and used on one thread: percentages are of the time since the last look of that thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = socket.gethostname()
        self._process = psutil.Process()
        self._rates = Rates()
        self._gpus: Gpus | None = None
        self._process.cpu_percent()
        self._look_at_machine()

    def sample(
        self, worker: int, step: int, device_memory: DeviceMemoryUse | None = None, *, for_host: bool
    ) -> SystemSampled:
        with self._process.oneshot():
            use = self._process.cpu_percent(), self._process.memory_info().rss, self._process.num_threads()
        # Looked at by everybody: whoever takes the lowest worker's place has something to compare with.
        machine = self._look_at_machine()
        if for_host and self._gpus is None:
            self._gpus = Gpus(load_nvml())
        gpus = self._gpus.read() if for_host and self._gpus is not None else ()
        cpu, memory, threads = use
        return SystemSampled(
            step=step,
            worker=worker,
            host=self._host,
            cpu_percent=cpu,
            memory_bytes=memory,
            threads=threads,
            device_memory=device_memory,
            machine=machine if for_host else None,
            gpus=gpus,
        )

    def _look_at_machine(self) -> MachineLoad:
        rates = self._rates.since_last(time.monotonic(), _counters())
        total = min(psutil.virtual_memory().total, read_limits().memory or _NO_LIMIT)
        free = total_disk = None
        with suppress(OSError):  # a folder that somebody has removed, or a disk that does not answer
            total_disk, _, free = shutil.disk_usage(self._folder)
        return MachineLoad(
            cpu_percent=psutil.cpu_percent(),
            memory_used_bytes=max(0, total - free_memory()),
            memory_total_bytes=total,
            network_received_bytes_per_second=rates.get("received"),
            network_sent_bytes_per_second=rates.get("sent"),
            disk_read_bytes_per_second=rates.get("read"),
            disk_written_bytes_per_second=rates.get("written"),
            disk_free_bytes=free,
            disk_total_bytes=total_disk,
        )


def _counters() -> dict[str, int]:
    """Bytes since the machine was started; what the system does not tell is left out."""
    counters: dict[str, int] = {}
    with suppress(OSError, RuntimeError):  # a container that hides them
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != _LOOPBACK]
        counters |= {"received": sum(card.bytes_recv for card in cards), "sent": sum(card.bytes_sent for card in cards)}
    with suppress(OSError, RuntimeError):
        disks = psutil.disk_io_counters()
        if disks is not None:
            counters |= {"read": disks.read_bytes, "written": disks.write_bytes}
    return counters


class Rates:
    """Counters as rates: per second since the last look."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: Mapping[str, int] = {}

    def since_last(self, now: float, counters: Mapping[str, int]) -> dict[str, float]:
        """Without those that were not there at the last look, or have gone back since: a card was taken out."""
        seconds, before = now - self._at, self._before
        self._at, self._before = now, dict(counters)
        grown = {name: value - before[name] for name, value in counters.items() if name in before}
        return {name: round(more / seconds, 1) for name, more in grown.items() if more >= 0} if seconds > 0 else {}


def load_nvml() -> ModuleType | None:
    """NVML, where its library for Python and a driver are there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("the GPUs of this machine are not watched: %s", error)
        return None
    module: ModuleType = pynvml
    return module


class Gpus:
    """The GPUs of this machine, as NVML tells; none without it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = None if nvml is None else self._ask(nvml.nvmlDeviceGetCount)
        self._handles = [(index, self._ask(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count or 0)]

    def read(self) -> tuple[GpuLoad, ...]:
        return tuple(self._read_one(index, handle) for index, handle in self._handles if handle is not None)

    def _read_one(self, index: int, handle: Any) -> GpuLoad:
        nvml = self._nvml
        name = self._ask(nvml.nvmlDeviceGetName, handle) or ""
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuLoad(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name,  # of older libraries
            use_percent=None if use is None else use.gpu,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            temperature_celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1000,
        )

    def _ask(self, question: Callable[..., Any], *of_what: Any) -> Any:
        """The answer; None where this GPU does not know it, or has gone."""
        try:
            return question(*of_what)
        except self._nvml.NVMLError:
            return None
