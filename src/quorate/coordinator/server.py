"""Where a coordinator listens, and who may call it."""

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from quorate.core.addresses import join_address
from quorate.core.errors import RequestError
from quorate.core.generation import file_name_of
from quorate.wire.handshake import SUPERVISOR, Identity, in_words, process_in
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import MESSAGE_OPTIONS, carries_token, handlers_of

log = logging.getLogger(__name__)


def speaker_of(request: Any) -> str | None:
    """The process that has to show its certificate for a request; None where the token is enough."""
    match request:
        case pb.RegisterRequest():
            return file_name_of(request.slot)
        case pb.HeartbeatRequest() | pb.StateReport() | pb.CompleteRequest() | pb.FollowRequest():
            return file_name_of(request.worker)
        case pb.FailureReport() if request.HasField("worker"):
            return file_name_of(request.worker)
        case pb.ExitReport():
            return SUPERVISOR
        case _:
            return None


class Admission:
    """Turns away, before a call is answered, whoever does not carry the job's token or, where the job encrypts, speaks
    for a process that it is not by its certificate; and everybody once another coordinator has a higher incarnation:
    who calls tries again, there."""

    def __init__(self, token: str, is_superseded: Callable[[], bool], *, asks_for_certificate: bool) -> None:
        if not token:
            raise ValueError("a coordinator needs a token: an empty one would let everybody in")
        self._token = token
        self._is_superseded = is_superseded
        self._asks_for_certificate = asks_for_certificate

    def guarded(self, method: Any, *, is_stream: bool) -> Any:
        """A method of the service that is called by those who are let in."""

        async def answer(request: Any, context: Any) -> Any:
            await self._judge(request, context)
            return await method(request, context)

        async def stream(request: Any, context: Any) -> Any:
            await self._judge(request, context)
            async for reply in method(request, context):
                yield reply

        return stream if is_stream else answer

    async def _judge(self, request: Any, context: Any) -> None:
        if not carries_token(context.invocation_metadata() or (), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this job's token")
        if self._is_superseded():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another coordinator has taken the place of this one")
        speaker = speaker_of(request) if self._asks_for_certificate else None
        names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
        shown = next((process for process in map(process_in, names) if process), "")
        if speaker is not None and shown != speaker:
            whose = f"the certificate of {in_words(shown)}" if shown else "no certificate"
            message = f"a caller ({context.peer()}) spoke for {in_words(speaker)} and showed {whose}"
            log.warning("refused: %s", message)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)


def open_server(
    service: object,
    token: str,
    host: str,
    port: int,
    identity: Identity | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
) -> tuple[grpc.aio.Server, str]:
    """What serves a coordinator once it is started, and the address that it listens at.

    With an identity it is encrypted, and whoever calls has to show a certificate of the job beside its token.
    """
    # Without so_reuseport=0 two coordinators could share a port, and each would get half of the other's calls.
    options = (("grpc.so_reuseport", 0), *MESSAGE_OPTIONS)
    admission = Admission(token, is_superseded, asks_for_certificate=identity is not None)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handlers_of(service, admission.guarded),))
    try:
        if identity is None:
            bound = server.add_insecure_port(join_address(host, port))
        else:
            bound = server.add_secure_port(join_address(host, port), _credentials(identity, asks_for_certificate=True))
    except RuntimeError as error:
        raise RequestError(explain_refusal(host, port, str(error))) from None
    return server, join_address(host, bound)


def open_door(server: grpc.aio.Server, host: str, identity: Identity) -> dict[str, str]:
    """A second port, for the owner of the run, who holds its token but no key: where it is, and by which authority's
    certificate the coordinator is known there. Written down with the token, since neither lets anybody be a worker."""
    bound = server.add_secure_port(join_address(host, 0), _credentials(identity, asks_for_certificate=False))
    return {"address": join_address(host, bound), "authority": identity.authority}


def _credentials(identity: Identity, *, asks_for_certificate: bool) -> Any:
    return grpc.ssl_server_credentials(
        [(identity.key.encode(), identity.certificate.encode())],
        identity.authority.encode() if asks_for_certificate else None,
        require_client_auth=asks_for_certificate,
    )


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
