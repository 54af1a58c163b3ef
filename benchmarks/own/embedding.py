"""A step of a large table over TCP: a worker's gradient to a server, SGD there, and the new values back.

Sparse, what travels and what is updated are the rows that the step touches; dense, it is the whole table.
"""

import secrets
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from benchmarks.gang import Seat, run_gang
from benchmarks.own.push_pull import LOOPBACK, endpoint_of
from benchmarks.push_pull import SERVER, WORKER
from benchmarks.told import answer, read_order, reading
from quorate.collectives.connect import connect
from quorate.collectives.endpoint import Listeners
from quorate.collectives.neighbours import watch
from quorate.lanes.buckets import Bucket, TensorShape, plan_buckets
from quorate.strategies.servers.exchange import Lanes, Star
from quorate.strategies.servers.links import Spokes, connect_star
from quorate.strategies.servers.rows import RowExchange, Rows, Table

WARM_UP = 2
RATE = 0.1

Step = Callable[[int, torch.Tensor], None]
"""Takes a step's number, and the rows that it touches."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    torch.set_num_threads(1)
    token = secrets.token_urlsafe(16)
    worker, _ = run_gang(2, lambda seat: _work(seat, order, token))
    details = {"sent_bytes": worker["sent"], "received_bytes": worker["received"]}
    answer(reading(order["case"], 2, worker["ms"], details=details))


def _work(seat: Seat, order: dict[str, Any], token: str) -> dict[str, Any]:
    rows, width = order["rows"], order["width"]
    size = 0 if order["sparse"] else rows * width
    plan = plan_buckets([TensorShape("table", "torch.float32", 4, size)], 25)
    listeners = Listeners.bind(LOOPBACK, shares_memory=False)
    addresses = seat.gather([listeners.network.address, listeners.local_address])
    endpoint = endpoint_of(seat, order, token, listeners, addresses)
    reduction, memory = connect(endpoint, plan)
    links = connect_star(endpoint, reduction)
    generation, member = endpoint.generation, endpoint.credentials.worker
    spokes = Spokes(generation, member, links, *watch(endpoint, list(links.values())))
    table = torch.nn.Embedding(rows, width, sparse=order["sparse"])
    with torch.no_grad():
        table.weight.zero_()
    try:
        is_sparse = order["sparse"]
        step = _sparse(seat, spokes, table) if is_sparse else _dense(seat, spokes, table, plan, memory.lanes)
        ms = []
        batches = [_batch(order, number) for number in range(WARM_UP + order["steps"])]
        for number, batch in enumerate(batches):
            if number == WARM_UP:
                spokes.bytes_sent = spokes.bytes_received = 0
            began = perf_counter()
            step(number, batch)
            if number >= WARM_UP:
                ms.append((perf_counter() - began) * 1000)
        steps = order["steps"]
        return {"ms": ms, "sent": spokes.bytes_sent / steps, "received": spokes.bytes_received / steps}
    finally:
        spokes.close()
        reduction.close()
        listeners.close()


def _batch(order: dict[str, Any], step: int) -> torch.Tensor:
    """The rows that a step touches."""
    return torch.randperm(order["rows"], generator=torch.Generator().manual_seed(step))[: order["touched"]]


def _gradient(table: torch.nn.Embedding, batch: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(table(batch).sum(), table.weight)
    return gradient


def _sparse(seat: Seat, spokes: Spokes, table: torch.nn.Embedding) -> Step:
    exchange = RowExchange(spokes, {0: Table.of(table.weight)}, [(SERVER,)])
    optimizer = torch.optim.SGD(table.parameters(), RATE)

    def work(step: int, batch: torch.Tensor) -> None:
        exchange.push(step, {0: {0: Rows.of_gradient(_gradient(table, batch))}})
        for changed in exchange.pull(step).values():
            changed.put_into(table.weight)

    def serve(step: int, _: torch.Tensor) -> None:
        exchange.receive(step)
        total = exchange.add_up()[0]
        table.weight.grad = total.as_gradient(table.weight)
        optimizer.step()
        exchange.publish(step, {0: Rows.of_table(table.weight, total.indices)})

    return work if seat.position == WORKER else serve


def _dense(seat: Seat, spokes: Spokes, table: torch.nn.Embedding, plan: tuple[Bucket, ...], lanes: Lanes) -> Step:
    exchange = Star(spokes, plan, [(SERVER,)], lanes)
    optimizer = torch.optim.SGD(table.parameters(), RATE)
    values = table.weight.detach().view(-1)
    total = torch.empty_like(values)

    def work(step: int, batch: torch.Tensor) -> None:
        lanes[0][0].copy_(_gradient(table, batch).view(-1))
        exchange.push(step)
        exchange.pull(step, {0: values})

    def serve(step: int, _: torch.Tensor) -> None:
        exchange.receive(step)
        exchange.add_up(step, {0: total})
        table.weight.grad = total.view(table.weight.shape)
        optimizer.step()
        exchange.publish(step, {0: values})

    return work if seat.position == WORKER else serve


if __name__ == "__main__":
    main()
