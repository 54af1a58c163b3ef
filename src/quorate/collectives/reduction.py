"""What a strategy asks of the workers that it sums with, and the sum itself."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import torch

from quorate.core.spans import SpanRecorder
from quorate.lanes.chunks import cut, summation_order

M = TypeVar("M")

PROBES = 5
"""Round trips of which the fastest counts: the first waits for the others to come, and any may meet a busy core."""

STRETCH = 2**15
"""Elements that are summed over all lanes before the next are looked at: they stay in a core's cache meanwhile."""


class Reduction(Protocol):
    """Sums and gathers among the workers of a generation. Any failure closes it for all. One thread at a time.

    `all_reduce` fills `total` with the sum over all lanes in ring order: the same bits on every worker. `lane_values`
    has one flat tensor for each hosted lane, in lane order; `index` tells apart what is summed in one step, and all
    workers call with the same ones in the same order. `gather` gives everyone's payload, by ring position.

    `broadcast` fills the buffers of the receivers with what is in that of the root; both are given as ring positions.
    All members call it, with buffers of one size. That of a member which is neither is scratch memory: what it passes
    on goes through there. So whoever needs nothing of a large state needs no more memory than one piece.

    `round_trip` is how many seconds a message takes to the next worker and back, the best of a few, or None for a
    worker that is alone; all call it, between two steps. `bytes_passed` go from this worker to others for the sum of so
    many elements. It is worth summing in another thread while the backward pass runs where it `overlaps`. `spans` is
    set in a step that is traced, by whoever sums in it. Any thread may `close` it, any number of times.
    """

    spans: SpanRecorder | None

    @property
    def overlaps(self) -> bool: ...

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None: ...

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]: ...

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None: ...

    def round_trip(self) -> float | None: ...

    def bytes_passed(self, elements: int, itemsize: int) -> int: ...

    def close(self) -> None: ...


class Alone:
    """The `Reduction` of a worker that is alone."""

    overlaps = False
    spans: SpanRecorder | None = None

    def all_reduce(self, step: int, index: int, lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:  # noqa: ARG002
        sum_lanes(lane_values, total)

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:  # noqa: ARG002
        return (payload,)

    def broadcast(self, step: int, index: int, root: int, buffer: memoryview, receivers: Collection[int]) -> None:
        pass

    def round_trip(self) -> float | None:
        return None

    def bytes_passed(self, elements: int, itemsize: int) -> int:  # noqa: ARG002
        return 0

    def close(self) -> None:
        pass


def probe_neighbours(
    position: int, messages: Sequence[tuple[M, M]], ask: Callable[[M, M], None], answer: Callable[[M, M], None]
) -> float:
    """Seconds of the fastest round trip to the next worker, while the one before this makes its own to here.

    Every other worker asks first, and the rest answer first: nobody waits for one that waits as well.
    """

    def answer_all() -> None:
        for message in messages:
            answer(*message)

    if position % 2:
        answer_all()
    shortest = math.inf
    for message in messages:
        began = time.perf_counter()
        ask(*message)
        shortest = min(shortest, time.perf_counter() - began)
    if not position % 2:
        answer_all()
    return shortest


def sum_lanes(lane_values: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """The sum that every all-reduce comes to, to the bit, where the values of all lanes are in one place."""
    for chunk, place in enumerate(cut(total.numel(), len(lane_values))):
        first, *rest = (lane_values[lane][place] for lane in summation_order(chunk, len(lane_values)))
        add_up(first, rest, total[place])


def add_up_in_stretches(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The same bits as `add_up` gives, sooner where there are more than two terms: none leaves the cache in between."""
    first, *rest = terms
    if len(rest) <= 1:
        add_up(first, rest, out)
        return
    for start in range(0, out.numel(), STRETCH):
        stretch = slice(start, start + STRETCH)
        add_up(first[stretch], [term[stretch] for term in rest], out[stretch])


def add_up(first: torch.Tensor, rest: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Lane after lane, each addition rounded. Never from zeros: 0.0 + -0.0 is 0.0, and the sign is part of the bits."""
    if not rest:
        out.copy_(first)
        return
    torch.add(first, rest[0], out=out)
    for term in rest[1:]:
        out.add_(term)
