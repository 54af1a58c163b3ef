"""How a worker calls its coordinator."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from quorate.core.timing import Timing
from quorate.wire.proto.channel import open_channel, token_metadata, unanswered
from quorate.wire.proto.coordinator_pb2_grpc import CoordinatorStub


class Calls:
    """A channel to the coordinator. It starts threads, so it is opened in the worker itself, after the fork."""

    def __init__(self, address: str, token: str, timing: Timing) -> None:
        self.address = address
        self.closing = threading.Event()
        self._metadata = token_metadata(token)
        self._timing = timing
        self._channel = open_channel(address)
        self.stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: Any, request: Any, timeout: float) -> Any:
        """The answer. Raises grpc.RpcError, or ValueError once the channel is closed."""
        return method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)

    def ask(self, method: Any, request: Any, timeout: float) -> Any:
        """The answer; a LinkError if there is none."""
        try:
            return self.call(method, request, timeout)
        except grpc.RpcError as error:
            raise unanswered(self.address, error) from None

    def ask_until_answered(self, method: Any, request: Any, go_on: Callable[[], bool]) -> Any:
        """The answer, however often it has to be asked for; None once `go_on` says no."""
        while True:
            try:
                return self.call(method, request, self._timing.failure_timeout)
            except grpc.RpcError as error:
                if not _may_pass(error):
                    raise unanswered(self.address, error) from None
            if not go_on():
                return None
            self.closing.wait(self._timing.heartbeat_every)

    def listen(self, method: Any, request: Any) -> Any:
        """A stream of answers, which can be cancelled."""
        return method(request, metadata=self._metadata, wait_for_ready=True)

    def close(self) -> None:
        """Call no more; a call under way ends."""
        self.closing.set()
        self._channel.close()


def _may_pass(error: Any) -> bool:
    return error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
