"""A reduction among all members, and the links between workers and servers beside it: they end together."""

from collections.abc import Collection, Mapping, Sequence

import torch

from quorate.core.spans import SpanRecorder
from quorate.reduce.connect import Neighbour
from quorate.reduce.reduction import Reduction


class LinkedReduction:
    """The reduction of a generation, and with it the links to servers: who closes one closes all."""

    def __init__(self, reduction: Reduction, links: Mapping[int, Neighbour]) -> None:
        self._reduction = reduction
        self._links = links
        self.overlaps = False

    @property
    def spans(self) -> SpanRecorder | None:
        """Where it times its parts."""
        return self._reduction.spans

    @spans.setter
    def spans(self, spans: SpanRecorder | None) -> None:
        self._reduction.spans = spans

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        self._reduction.all_reduce(step, index, lane_values, total)

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        return self._reduction.gather(step, index, payload)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        self._reduction.broadcast(step, index, root, buffer, receivers)

    def round_trip(self) -> float | None:
        return self._reduction.round_trip()

    def bytes_passed(self, elements: int, itemsize: int) -> int:
        return self._reduction.bytes_passed(elements, itemsize)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._reduction.close()
