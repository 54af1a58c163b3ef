"""The kinds of events of some jobs only: those that are tracked or traced, compress, or apply updates that are late."""

from dataclasses import dataclass, field
from typing import Any

from quorate.core.spans import Span
from quorate.observe.event import Count, DeviceMemoryUse, Event, Number, event, plain


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """How busy a host is. Its memory is that of its container, where it has one with a limit; its network is without
    loopback; its disk is the one with the run folder. None if the system does not report it."""

    cpu_percent: Number | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    network_received_bytes_per_second: Number | None = None
    network_sent_bytes_per_second: Number | None = None
    disk_read_bytes_per_second: Number | None = None
    disk_written_bytes_per_second: Number | None = None
    disk_free_bytes: Count | None = None
    disk_total_bytes: Count | None = None


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """How busy a GPU of a host is, by its driver; None if the driver does not report it."""

    index: Count
    name: str = ""
    use_percent: Number | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    temperature_celsius: Number | None = None
    power_watts: Number | None = None


@event(kind="system")
class SystemSampled(Event):
    """What the process of a worker uses: CPU in percent of one core, resident memory, threads, and peak memory
    of its GPU since the last sample. The worker with the lowest number on each host also samples the machine and its
    GPUs. Only in tracked jobs."""

    worker: Count | None = None
    host: str = ""
    cpu_percent: Number | None = None
    memory_bytes: Count | None = None
    threads: Count | None = None
    device_memory: DeviceMemoryUse | None = None
    machine: MachineLoad | None = None
    gpus: tuple[GpuLoad, ...] = ()


@event(kind="staleness")
class StalenessObserved(Event):
    """How late updates came since the step `from_step`, where units of work are applied one by one.

    `updates` counts units by the number of other updates between their pull and their push. `gap` is the most steps
    that a unit was started ahead of the oldest unapplied one; `bound` is the limit.
    """

    from_step: Count = 0
    updates: dict[str, Count] = field(default_factory=dict)
    gap: Count = 0
    bound: Count | None = None


@event(kind="compression")
class GradientsCompressed(Event):
    """What a step's gradients have taken where a job compresses them: bytes of one lane, and bytes that the worker of
    lane 0 has sent and received, and the same without compression (received: if it differs from sent). Once in a
    generation, after its first step."""

    generation: str | None = None
    worker: Count | None = None
    lane_bytes: Count
    lane_bytes_dense: Count
    sent_bytes: Count
    received_bytes: Count
    sent_bytes_dense: Count
    received_bytes_dense: Count | None = None


@event(kind="spans")
class StepTraced(Event):
    """What one worker has done in a step of a generation, or on the way into it, or to save it: one for each root.

    Spans begin some seconds after `began`, which is by the coordinator's clock: it is `clock_offset` ahead of the
    worker's own, give or take `clock_uncertainty`. Both are None where the coordinator's clock is not known; then the
    worker's counts. `first` is the worker that hosts lane 0.
    """

    generation: str
    worker: Count
    first: Count = 0
    began: Number
    clock_offset: Number | None = None
    clock_uncertainty: Number | None = None
    spans: tuple[Span, ...]

    def own_fields(self) -> dict[str, Any]:
        """Times to a tenth of a microsecond. Made when it is told, which is not in the way of training."""
        told: dict[str, Any] = plain(self)
        told["spans"] = [[name, round(start, 7), round(took, 7), *rest] for name, start, took, *rest in self.spans]
        for name in ("began", "clock_offset", "clock_uncertainty"):
            if told.get(name) is not None:
                told[name] = round(told[name], 7)
        return told
