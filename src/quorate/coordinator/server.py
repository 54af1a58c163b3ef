"""Where the coordinator listens, and who may call it."""

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from quorate.coordinator.service import CoordinatorService
from quorate.core.errors import RequestError
from quorate.wire.proto.channel import MESSAGE_OPTIONS, carries_token
from quorate.wire.proto.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from quorate.wire.sockets import join_address


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Turns away every call that does not carry the job's token, whatever its method."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("a coordinator needs a token: an empty one would let everybody in")
        self._token = token
        self._turn_away = grpc.unary_unary_rpc_method_handler(_turn_away)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Go on with the call if it may."""
        return await continuation(call) if carries_token(call.invocation_metadata, self._token) else self._turn_away


async def _turn_away(_request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")


class CoordinatorServer:
    """A served coordinator. `address` is where it listens."""

    def __init__(self, service: CoordinatorService, token: str, host: str, port: int) -> None:
        # Without so_reuseport=0 two coordinators could share a port, and each would get half of the other's calls.
        options = (("grpc.so_reuseport", 0), *MESSAGE_OPTIONS)
        self._server = grpc.aio.server(interceptors=(TokenGuard(token),), options=options)
        add_CoordinatorServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        try:
            bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise RequestError(explain_refusal(host, port, str(error))) from None
        self.address = join_address(host, bound)

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Answer nothing new, let calls under way end for at most `grace` seconds, and give the port back."""
        await self._server.stop(grace)


def explain_refusal(host: str, port: int, detail: str) -> str:
    """Why a port cannot be had, and what to do. gRPC only says that it cannot, so the operating system is asked."""
    place, remedy = join_address(host, port), "choose another with `port`, or 0 for any free one"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use; {remedy}"
        return f"cannot listen on {place}: {error.strerror or error}; {remedy}"
    return f"cannot listen on {place}: {detail}"
