"""The same gradient to a server and back over gRPC: both ways are streams of pieces, as messages are limited."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy

from benchmarks.gang import Seat, run_gang
from benchmarks.push_pull import WORKER, ask, readings_of, serve
from benchmarks.size import ELEMENT
from benchmarks.spans import Span
from benchmarks.told import answer, read_order

PIECE = 2**20
"""Bytes of a message: of 64 KB to 4 MB (the most that gRPC takes by default) the fastest here."""
METHOD = "/quorate.benchmark.Server/PushAndPull"
OPTIONS = [("grpc.max_receive_message_length", 2 * PIECE), ("grpc.max_send_message_length", 2 * PIECE)]


class Worker:
    """One gradient."""

    def __init__(self, address: str, size: int) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call = self._channel.stream_stream(METHOD)
        self._gradient = numpy.zeros(size // ELEMENT, numpy.float32)
        self._values = numpy.zeros_like(self._gradient)

    def fill(self, value: float) -> None:
        """Write the gradient."""
        self._gradient.fill(value)

    def push_and_pull(self) -> None:
        """One call: it answers when it has heard all."""
        put_together(self._call(pieces(self._gradient), wait_for_ready=True), self._values)

    def extremes(self) -> tuple[float, float]:
        """Of the new values."""
        return float(self._values.min()), float(self._values.max())

    def close(self) -> None:
        self._channel.close()


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """It gives out the gradient as the new values."""

    def __init__(self, size: int) -> None:
        self._total = numpy.zeros(size // ELEMENT, numpy.float32)
        self.answered = threading.Semaphore(0)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._push_and_pull) if details.method == METHOD else None

    def _push_and_pull(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        put_together(requests, self._total)
        yield from pieces(self._total)
        self.answered.release()


def pieces(values: numpy.ndarray) -> Iterator[bytes]:
    """The bytes of an array, in messages."""
    content = values.view(numpy.uint8).data
    for start in range(0, len(content), PIECE):
        yield bytes(content[start : start + PIECE])


def put_together(messages: Iterator[bytes], values: numpy.ndarray) -> None:
    """Fill an array with what comes."""
    content, end = values.view(numpy.uint8).data, 0
    for message in messages:
        content[end : end + len(message)] = message
        end += len(message)
    if end != len(content):
        raise RuntimeError(f"{end} bytes have come where {len(content)} are expected")


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    answer(*readings_of(order, run_gang(2, lambda seat: _take_part(seat, order))))


def _take_part(seat: Seat, order: dict[str, Any]) -> list[list[Span]]:
    return [_exchange(seat, size, repeats) for size, repeats in zip(order["sizes"], order["repeats"], strict=True)]


def _exchange(seat: Seat, size: int, repeats: int) -> list[Span]:
    if seat.position == WORKER:
        worker = Worker(next(said for said in seat.gather("") if said), size)
        spans = list(ask(worker, repeats))
        worker.close()
        seat.gather("")
        return spans
    handler = Server(size)
    server = grpc.server(ThreadPoolExecutor(1), [handler], options=OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    seat.gather(f"127.0.0.1:{port}")
    spans = list(serve(lambda: _await(handler.answered), repeats))
    seat.gather("")
    server.stop(None).wait()
    return spans


def _await(answered: threading.Semaphore) -> None:
    answered.acquire()


if __name__ == "__main__":
    main()
