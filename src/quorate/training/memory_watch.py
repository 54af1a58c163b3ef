"""How much of its device's memory a worker uses, told when it is short; and what is done again once it ran out."""

import logging
import threading

from quorate.core.errors import JobError
from quorate.observe.event import DeviceMemoryUse
from quorate.observe.events import MemoryRanOut
from quorate.observe.quantities import gibibytes
from quorate.replica.device import Device
from quorate.spec.job import JobSpec
from quorate.training.strategy import Shortage

log = logging.getLogger(__name__)

NEARLY_FULL = 0.95
"""Of a device's memory. Beyond it PyTorch soon has to give back what it keeps, which takes time, before it runs out."""


class MemoryWatch:
    """Made once in a worker, when its model is built. Asked by the loop, and by what samples the system on its thread:
    a device tells what was since it was last asked, so nobody else asks it."""

    def __init__(self, spec: JobSpec, device: Device) -> None:
        self._spec = spec
        self._device = device
        self._lock = threading.Lock()
        self._most: DeviceMemoryUse | None = None
        self._since_taken: DeviceMemoryUse | None = None
        self._has_warned = False
        self._steps = 0
        device.memory_use()  # what it took to build the model and to try compiling it is no part of training

    def look(self) -> DeviceMemoryUse | None:
        """The most that was used so far."""
        with self._lock:
            if (use := self._device.memory_use()) is not None:
                self._most = use.with_earlier(self._most)
                self._since_taken = use.with_earlier(self._since_taken)
            return self._most

    def take(self) -> DeviceMemoryUse | None:
        """The most that was used since it was last taken."""
        self.look()
        with self._lock:
            taken, self._since_taken = self._since_taken, None
        return taken

    def notes(self) -> list[str]:
        """That memory is nearly full, once. Called at every step on a device, and looks at the first, second, fourth,
        eighth … of this process, which may have begun anywhere in the job."""
        self._steps += 1
        is_quiet = self._has_warned or self._steps & (self._steps - 1) or self._spec.on_out_of_memory == "shrink"
        use = None if is_quiet else self.look()
        if use is None or use.reserved_bytes < NEARLY_FULL * use.total_bytes:
            return []
        self._has_warned = True
        advice = {
            "`on_out_of_memory: shrink` continues with smaller micro-batches": self._spec.strategy.kind == "ring",
            "`memory: {checkpoint_activations: true}` needs less": not self._spec.memory.checkpoint_activations,
        }
        told = ", ".join(sentence for sentence, holds in advice.items() if holds)
        note = (
            "the memory of the GPU is nearly full: "
            f"{gibibytes(use.reserved_bytes)} of {gibibytes(use.total_bytes)} GiB. "
            f"If it runs out, the job ends{f'; {told}' if told else ''}."
        )
        log.warning("%s", note)
        return [note]


def more_micro_batches(spec: JobSpec, step: int, shortage: Shortage) -> int:
    """Twice as many as were tried, or what others knew already. Raises where each has one sample."""
    if not shortage.lanes:
        return shortage.tried
    samples = -(-spec.batch_size // spec.lanes)
    if shortage.tried >= samples:
        from quorate.task.hints import what_needs_less_memory  # rarely

        raise JobError(
            f"Memory ran out in lane {shortage.lanes[0]} at step {step} with one sample at a time, so there is no "
            f"smaller micro-batch ({shortage.why}). {what_needs_less_memory(spec)}"
        )
    return min(2 * shortage.tried, samples)


def memory_ran_out(spec: JobSpec, step: int, micro_batches: int, shortage: Shortage | None) -> MemoryRanOut:
    """Of a step that is done, however often it was tried: there is one number that it was done with."""
    return MemoryRanOut(
        step=step,
        lanes=() if shortage is None else shortage.lanes,
        micro_batches=micro_batches,
        samples=-(-spec.batch_size // (spec.lanes * micro_batches)),
        reason=None if shortage is None else shortage.why or None,
    )
