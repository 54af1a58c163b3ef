"""How a worker calls its coordinator: a protocol of three methods, and gRPC as what fulfils it."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from quorate.wire.handshake import COORDINATOR, Identity
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import open_channel, stub_on, token_metadata, unanswered

log = logging.getLogger(__name__)

Request = pb.RegisterRequest | pb.HeartbeatRequest | pb.StateReport | pb.FailureReport | pb.CompleteRequest

_METHODS = {
    pb.RegisterRequest: "Register",
    pb.HeartbeatRequest: "Heartbeat",
    pb.StateReport: "ReportState",
    pb.FailureReport: "ReportFailure",
    pb.CompleteRequest: "Complete",
}
_PASSING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


class CoordinatorLink(Protocol):
    """The calls of one worker. Its membership calls from several threads at once.

    `call` gives the reply of the service's method for such a request; None if there is none within so many seconds, or
    the coordinator has gone away: it may be asked again. It raises LinkError if asking again is no use. `follow` gives
    what the coordinator has declared and declares, in its order, until the connection breaks. When it is closed, calls
    under way end without a reply, and so does what is followed.
    """

    address: str

    def call(self, request: Request, timeout: float) -> Any: ...

    def follow(self, request: pb.FollowRequest) -> Iterator[pb.Directive]: ...

    def close(self) -> None: ...


class GrpcLink:
    """A channel to the coordinator. It starts threads, so it is made in the worker itself, after the fork.

    `find` gives the address of whoever is the coordinator now, where that may be on another host than the last.
    """

    def __init__(
        self,
        address: str,
        token: str,
        identity: Identity | None = None,
        find: Callable[[], str | None] | None = None,
    ) -> None:
        self._find = find
        self._identity = identity
        self._was_answered = False
        self._metadata = token_metadata(token)
        self._stream: Any = None
        self._is_closed = False
        self._turn = threading.Lock()
        self._open(address)

    def _open(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address, self._identity)
        self._stub = stub_on(self._channel)
        if self._find is not None:
            self._channel.subscribe(self._note)

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # Apart: this is a thread of the channel's, which is closed if the coordinator has moved.
            threading.Thread(target=self._follow_to_next, name="coordinator-moved", daemon=True).start()

    def _follow_to_next(self) -> None:
        """Nobody is there. Calls to it end without a reply if another listens elsewhere, and are made again there."""
        with self._turn:
            address = None if self._find is None else self._find()
            if address is None or address == self.address or self._is_closed:
                return
            log.info("the coordinator has moved from %s to %s", self.address, address)
            last = self._channel
            self._open(address)
        last.close()

    def call(self, request: Request, timeout: float) -> Any:
        method = getattr(self._stub, _METHODS[type(request)])
        try:
            reply = method(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)
            self._was_answered = True
            return reply
        except grpc.RpcError as error:
            if error.code() not in _PASSING:
                raise unanswered(self.address, error) from None
            log.debug("a call was not answered: %r", error)
            self._follow_to_next()  # of a host that lost its power the channel learns nothing
            self._check_certificates(timeout)
        except ValueError as error:  # what gRPC raises for a closed channel
            log.debug("the channel is closed: %r", error)
        return None

    def _check_certificates(self, timeout: float) -> None:
        """Whether the two ends refuse each other's certificates: then to ask again is no use."""
        if self._identity is None or self._was_answered or self._is_closed:
            return
        from quorate.wire.tls import refusal_at

        refusal = refusal_at(self.address, self._identity, COORDINATOR, timeout)
        if refusal is not None:
            raise refusal

    def follow(self, request: pb.FollowRequest) -> Iterator[pb.Directive]:
        try:
            self._stream = self._stub.Follow(request, metadata=self._metadata, wait_for_ready=True)
            if self._is_closed:  # `close` came before there was a stream that it could cancel
                self._stream.cancel()
            yield from self._stream
        except (grpc.RpcError, ValueError) as error:
            log.debug("the coordinator's directives broke off: %r", error)

    def close(self) -> None:
        with self._turn:
            self._is_closed = True
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()
