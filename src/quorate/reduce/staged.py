"""Sums of what lies in the memory of a device, by way of the host's: for devices whose memory the others do not see."""

from collections.abc import Collection, Sequence

import torch

from quorate.core.spans import SpanRecorder
from quorate.reduce.memory import GradientMemory
from quorate.reduce.reduction import Reduction, sum_lanes


class Staged:
    """A `Reduction` of tensors on a device. The lanes are copied to the host, summed there in the ring's order, and the
    sum is copied back: additions are rounded alike here and there, so the bits are the same.

    A worker that is alone sums on the device.
    """

    def __init__(self, links: Reduction, host: GradientMemory, workers: int) -> None:
        self._links = links
        self._host = host
        self._is_alone = workers == 1

    @property
    def spans(self) -> SpanRecorder | None:
        return self._links.spans

    @spans.setter
    def spans(self, spans: SpanRecorder | None) -> None:
        self._links.spans = spans

    @property
    def overlaps(self) -> bool:
        """A copy to the host waits for the backward pass."""
        return False

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        if self._is_alone:
            sum_lanes(lane_values, total)
            return
        lanes = [buckets[index] for buckets in self._host.lanes.values()]
        for staged, value in zip(lanes, lane_values, strict=True):
            staged.copy_(value)
        self._links.all_reduce(step, index, lanes, self._host.total[index])
        total.copy_(self._host.total[index])

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        return self._links.gather(step, index, payload)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        self._links.broadcast(step, index, root, buffer, receivers)

    def round_trip(self) -> float | None:
        return self._links.round_trip()

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        return self._links.bytes_passed(elements, itemsize)

    def close(self) -> None:
        self._links.close()
