"""A worker of one lane and a server without optimizer, connected as a generation of a job connects them."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gang import Seat, run_gang
from benchmarks.push_pull import SERVER, WORKER, ask, readings_of, serve
from benchmarks.size import ELEMENT
from benchmarks.spans import Span
from benchmarks.told import answer, read_order
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Endpoint, Listeners
from quorate.collectives.memory import GradientMemory
from quorate.collectives.neighbours import watch
from quorate.collectives.reduction import Reduction
from quorate.collectives.shared_memory import SharedMemoryReduction
from quorate.core.generation import Generation, GenerationId, Member, Role, server_id
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.strategies.servers.exchange import Exchange, SharedExchange, Star
from quorate.strategies.servers.links import LinkedReduction, Spokes, connect_star
from quorate.wire.handshake import Credentials

LOOPBACK = "127.0.0.1"
BLOCKS = 8
"""Parameters that a gradient consists of, of equal size."""
MEMBERS = (0, server_id(0))


class Worker:
    """One lane."""

    def __init__(
        self, exchange: Exchange, reduction: Reduction, memory: GradientMemory, plan: Sequence[Bucket]
    ) -> None:
        self._exchange = exchange
        self._reduction = reduction
        self._lane = memory.lanes[0]
        self._values = values_of(plan, exchange)
        self._step = 0

    def fill(self, value: float) -> None:
        """Write the lane's gradient."""
        for bucket in self._lane:
            bucket.fill_(value)

    def push_and_pull(self) -> None:
        """A step as a worker sees it: what all agree upon stands between the two."""
        self._step += 1
        self._exchange.push(self._step)
        self._reduction.gather(self._step, 0, b"")
        self._exchange.pull(self._step, self._values)

    def extremes(self) -> tuple[float, float]:
        """Of the new values."""
        pairs = [torch.aminmax(value) for value in self._values.values()]
        return min(float(low) for low, _ in pairs), max(float(high) for _, high in pairs)


class Server:
    """It sums, and gives out the sum as the new values."""

    def __init__(self, exchange: Exchange, reduction: Reduction, plan: Sequence[Bucket]) -> None:
        self._exchange = exchange
        self._reduction = reduction
        self._totals = values_of(plan, exchange)
        self._step = 0

    def answer_one(self) -> None:
        self._step += 1
        self._exchange.receive(self._step)
        self._reduction.gather(self._step, 0, b"")
        self._exchange.add_up(self._step, self._totals)
        self._exchange.publish(self._step, self._totals)


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    answer(*readings_of(order, run_gang(2, lambda seat: _work(seat, order, token))))


def _work(seat: Seat, order: dict[str, Any], token: str) -> list[list[Span]]:
    """One member: for every size it meets the other anew."""
    return [
        _exchange(seat, order, token, size, repeats)
        for size, repeats in zip(order["sizes"], order["repeats"], strict=True)
    ]


def _exchange(seat: Seat, order: dict[str, Any], token: str, size: int, repeats: int) -> list[Span]:
    listeners = Listeners.bind(LOOPBACK, shares_memory=order["links"] == "shm")
    addresses = seat.gather([listeners.network.address, listeners.local_address])
    plan, endpoint = plan_of(size), endpoint_of(seat, order, token, listeners, addresses)
    try:
        exchange, reduction, memory = _connected(endpoint, plan, order["links"])
        try:
            if seat.position == WORKER:
                return list(ask(Worker(exchange, reduction, memory, plan), repeats))
            return list(serve(Server(exchange, reduction, plan).answer_one, repeats))
        finally:
            reduction.close()
    finally:
        listeners.close()


def _connected(endpoint: Endpoint, plan: Sequence[Bucket], links: str) -> tuple[Exchange, Reduction, GradientMemory]:
    generation, worker = endpoint.generation, endpoint.credentials.worker
    reduction, memory = connect(endpoint, plan)
    if isinstance(reduction, SharedMemoryReduction):
        return SharedExchange(generation, reduction, plan), reduction, memory
    if links == "shm":
        raise RuntimeError("the two cannot share memory here: the kernel does not tell that they are on one host")
    peers = connect_star(endpoint, reduction)
    spokes = Spokes(generation, worker, peers, *watch(endpoint, list(peers.values())))
    holders = [(SERVER,)] * sum(len(bucket.slots) for bucket in plan)
    return Star(spokes, plan, holders, memory.lanes), LinkedReduction(reduction, peers), memory


def endpoint_of(
    seat: Seat, order: dict[str, Any], token: str, listeners: Listeners, addresses: Sequence[tuple[str, str]]
) -> Endpoint:
    """The end of the worker or of the server."""
    over = time.monotonic() + order["limit"]
    members = tuple(
        Member(member, network, range(1) if member == MEMBERS[WORKER] else range(0), local, role=Role.of(member))
        for member, (network, local) in zip(MEMBERS, addresses, strict=True)
    )
    generation = Generation(GenerationId(1, 1), members)
    return Endpoint(
        generation,
        Credentials(token, MEMBERS[seat.position], generation.id),
        listeners,
        deadline=lambda: over - time.monotonic(),
        lease=lambda: over - time.monotonic(),
        silence=order["limit"],
    )


def plan_of(size: int) -> tuple[Bucket, ...]:
    """Buckets as a job has them, of parameters that make up this size."""
    elements = size // ELEMENT
    sizes = [elements // BLOCKS + (elements % BLOCKS if block == 0 else 0) for block in range(BLOCKS)]
    shapes = [TensorShape(str(block), "torch.float32", ELEMENT, numel) for block, numel in enumerate(sizes)]
    return plan_buckets(shapes, 25)


def values_of(plan: Sequence[Bucket], exchange: Exchange) -> dict[int, torch.Tensor]:
    """Of each block: the sum is formed where the worker reads it, as that of an all-reduce is."""
    return {slot.index: exchange.room(slot.index) for bucket in plan for slot in bucket.slots}


if __name__ == "__main__":
    main()
