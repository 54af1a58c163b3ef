"""Quorate's all-reduce among local workers of one lane each, as a generation of a job forms it.

A lane writes its gradient where the workers of a host share memory, and the optimizer reads the sum there: neither is
copied.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.exchange import exchange_all, readings_of
from benchmarks.gang import Seat, run_gang
from benchmarks.size import ELEMENT
from benchmarks.spans import Span
from benchmarks.told import answer, read_order
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.memory import GradientMemory
from quorate.collectives.reduction import Reduction
from quorate.collectives.shared_memory import SharedMemoryReduction
from quorate.core.generation import Generation, GenerationId, Member
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.wire.handshake import Credentials

LOOPBACK = "127.0.0.1"
ROOM_FOR_ONE = 2**-20
"""MiB: in buckets of this size, every tensor has its own."""


class LaneExchange:
    """One worker with one lane, and one bucket of its gradient."""

    def __init__(self, reduction: Reduction, memory: GradientMemory, lane: int, bucket: int) -> None:
        self._reduction = reduction
        self._lane = memory.lanes[lane][bucket]
        self._total = memory.total[bucket]
        self._bucket = bucket
        self._step = 0

    def fill(self, value: float) -> None:
        """Write the lane's gradient."""
        self._lane.fill_(value)

    def reduce(self) -> None:
        """Sum over all lanes."""
        self._step += 1
        self._reduction.all_reduce(self._step, self._bucket, [self._lane], self._total)

    def extremes(self) -> tuple[float, float]:
        """Of the total that the optimizer reads."""
        low, high = torch.aminmax(self._total)
        return float(low), float(high)


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    answer(*readings_of(order, run_gang(order["processes"], lambda seat: _work(seat, order, token))))


def _work(seat: Seat, order: dict[str, Any], token: str) -> list[list[Span]]:
    """One worker: connect to the others, and exchange every size."""
    listeners = Listeners.bind(LOOPBACK, shares_memory=order["links"] == "shm")
    addresses = seat.gather([listeners.network.address, listeners.local_address])
    endpoint = endpoint_of(seat, order, token, listeners, addresses)
    # Only torch writes to the total here, as in a job with one of torch's optimizers.
    reduction, memory = connect(endpoint, _plan(order["sizes"]), trusts_versions=True)
    try:
        if order["links"] == "shm" and not isinstance(reduction, SharedMemoryReduction):
            raise RuntimeError(
                "the workers cannot share memory here: the kernel does not tell that they are on one host"
            )
        return exchange_all(order, seat.position, lambda bucket: LaneExchange(reduction, memory, seat.position, bucket))
    finally:
        reduction.close()
        listeners.close()


def endpoint_of(
    seat: Seat, order: dict[str, Any], token: str, listeners: Listeners, addresses: Sequence[tuple[str, str]]
) -> Endpoint:
    """The end of one worker of a generation in which each hosts one lane."""
    over = time.monotonic() + order["limit"]
    members = tuple(
        Member(worker, network, range(worker, worker + 1), local) for worker, (network, local) in enumerate(addresses)
    )
    generation = Generation(GenerationId(1, 1), members)
    return Endpoint(
        generation,
        Credentials(token, seat.position, generation.id),
        listeners,
        deadline=lambda: over - time.monotonic(),
        lease=lambda: over - time.monotonic(),
        silence=order["limit"],
    )


def _plan(sizes: Sequence[int]) -> tuple[Bucket, ...]:
    """Bucket i is of size i: buckets are planned in reverse order of registration."""
    shapes = [TensorShape(str(size), "torch.float32", ELEMENT, size // ELEMENT) for size in reversed(sizes)]
    return plan_buckets(shapes, ROOM_FOR_ONE)


if __name__ == "__main__":
    main()
