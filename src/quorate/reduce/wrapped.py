"""A reduction that has another do what it does not do itself."""

from collections.abc import Collection, Sequence

import torch

from quorate.core.spans import SpanRecorder
from quorate.reduce.reduction import Reduction


class Wrapped:
    """A `Reduction` by way of another one, which it owns. By itself it does not overlap with the backward pass."""

    overlaps = False

    def __init__(self, links: Reduction) -> None:
        self._links = links

    @property
    def spans(self) -> SpanRecorder | None:
        """Where it times its parts."""
        return self._links.spans

    @spans.setter
    def spans(self, spans: SpanRecorder | None) -> None:
        self._links.spans = spans

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        self._links.all_reduce(step, index, lane_values, total)

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
