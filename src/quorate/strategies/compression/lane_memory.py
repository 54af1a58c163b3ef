"""What lanes keep from one step to the next, in memory that outlives the worker which hosts them.

The engine of a host holds the memory, by its descriptor, and hands it to each worker that it starts: whoever hosts a
lane next, a neighbour or a replacement, finds there what the lane has kept. A lane has two slots, each under the step
that it is of. What is kept after the next step is written to the one while the other stays as it is, so a worker that
is killed in the middle of it takes nothing along.
"""

import mmap
import os
import struct
from collections.abc import Sequence

import torch

from quorate.core.errors import OutOfMemory
from quorate.core.machine import machine_memory, read_limits
from quorate.lanes.buckets import Bucket
from quorate.reduce.memory import buckets_in, layout_of

Flat = tuple[torch.Tensor, ...]
"""What a lane keeps: a flat tensor for each bucket."""

_SLOTS = 2
_STEP = struct.Struct("<q")
_NOTHING = 0
"""The step of a slot that has nothing whole: a lane keeps something from step 1 on."""


class LaneMemory:
    """The lanes of a job in the memory of one host. Only the worker that hosts a lane writes there.

    Workers of a host pass the same descriptor; without one, the memory is the process's own.
    """

    def __init__(self, plan: Sequence[Bucket], lanes: int, descriptor: int | None = None) -> None:
        self._plan = plan
        self._layout = layout_of(plan)
        self._descriptor = os.memfd_create("quorate-lanes", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self.slot_size = self._layout.size
        page = mmap.PAGESIZE
        self._stride = page + -(-_SLOTS * self.slot_size // page) * page
        os.ftruncate(self._descriptor, lanes * self._stride)  # by everybody, to the same size
        self._content = mmap.mmap(self._descriptor, lanes * self._stride)
        self._reserved: set[int] = set()
        self._begun: dict[int, int] = {}

    def holds(self, lane: int, step: int) -> bool:
        """Whether what the lane has kept after a step is here, and whole."""
        return self._slot_of(lane, step) is not None

    def at(self, lane: int, step: int) -> Flat:
        """What the lane has kept after a step."""
        return self._kept_at(lane, self._found(lane, step))

    def content(self, lane: int, step: int) -> memoryview:
        """The same, as bytes."""
        return self._bytes(lane, self._found(lane, step))

    def packed(self, kept: Flat) -> memoryview:
        """The bytes that a slot would have with this in it."""
        content = bytearray(self.slot_size)
        for place, values in zip(buckets_in(content, self._plan, self._layout, 0), kept, strict=True):
            place.copy_(values)
        return memoryview(content)

    def begin(self, lane: int, kept: int) -> Flat:
        """Where to write what the lane keeps after another step; what it has kept after step `kept` stays."""
        self._begin(lane, kept)
        return self._kept_at(lane, self._begun[lane])

    def begin_copy(self, lane: int) -> memoryview:
        """Where to write what the lane has kept elsewhere, as bytes."""
        self._begin(lane, _NOTHING)
        return self._bytes(lane, self._begun[lane])

    def seal(self, lane: int, step: int) -> None:
        """What was begun is whole, and is what the lane keeps after this step."""
        self._mark(lane, self._begun.pop(lane), step)

    def _begin(self, lane: int, kept: int) -> None:
        self._reserve(lane)
        slot = 1 if kept and self._step(lane, 0) == kept else 0
        # Until it is sealed there is nothing in it that anybody may use.
        self._mark(lane, slot, _NOTHING)
        self._begun[lane] = slot

    def _reserve(self, lane: int) -> None:
        """Have all of a lane's memory: too little is an error now, not a signal at the first write."""
        if lane in self._reserved:
            return
        limits = read_limits().free_memory
        free = machine_memory() if limits is None else min(machine_memory(), limits)
        present = self._step(lane, 0) or self._step(lane, 1)
        if not present and self._stride > free:
            raise _too_little(lane, self._stride, free)
        try:
            os.posix_fallocate(self._descriptor, lane * self._stride, self._stride)
        except OSError as error:
            raise _too_little(lane, self._stride, free) from error
        self._reserved.add(lane)

    def _found(self, lane: int, step: int) -> int:
        slot = self._slot_of(lane, step)
        if slot is None:
            raise ValueError(f"lane {lane} has kept nothing here of step {step}")
        return slot

    def _slot_of(self, lane: int, step: int) -> int | None:
        return next((slot for slot in range(_SLOTS) if step and self._step(lane, slot) == step), None)

    def _step(self, lane: int, slot: int) -> int:
        step: int = _STEP.unpack_from(self._content, lane * self._stride + slot * _STEP.size)[0]
        return step

    def _mark(self, lane: int, slot: int, step: int) -> None:
        _STEP.pack_into(self._content, lane * self._stride + slot * _STEP.size, step)

    def _start(self, lane: int, slot: int) -> int:
        return lane * self._stride + mmap.PAGESIZE + slot * self.slot_size

    def _bytes(self, lane: int, slot: int) -> memoryview:
        start = self._start(lane, slot)
        return memoryview(self._content)[start : start + self.slot_size]

    def _kept_at(self, lane: int, slot: int) -> Flat:
        return buckets_in(self._content, self._plan, self._layout, self._start(lane, slot))


def _too_little(lane: int, size: int, free: int) -> OutOfMemory:
    return OutOfMemory(
        f"there is not enough memory for the {size:,} bytes that lane {lane} holds back of its gradients ({free:,} are "
        "free); use fewer `lanes` (which changes what the job computes), or `strategy.compress.feedback: false`."
    )
