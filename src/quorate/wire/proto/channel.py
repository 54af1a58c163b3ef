"""How a coordinator is called: the channel to it, the token that goes with every call, and a call without answer."""

import hmac
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from quorate.core.errors import FrameError, LinkError
from quorate.wire.handshake import COORDINATOR, Identity, host_of
from quorate.wire.proto import coordinator_pb2 as pb

TOKEN_KEY = "quorate-token"

# The digests of a model's tensors go in one message, and a model may have many.
MESSAGE_LIMIT = 64 * 2**20
MESSAGE_OPTIONS = (("grpc.max_receive_message_length", MESSAGE_LIMIT), ("grpc.max_send_message_length", MESSAGE_LIMIT))

_CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A proxy from the environment cannot reach a private address, and must not see the token.
    ("grpc.enable_http_proxy", 0),
    # gRPC waits 1 s and then up to 2 minutes before it connects again; a lease would be over by then.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Channels to one address share a connection otherwise, and with it its backoff and its end.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, identity: Identity | None = None, authority: str = "") -> grpc.Channel:
    """A channel to a coordinator. It starts threads: open it after a fork, never before.

    With an identity both ends show certificates; with the certificate of the authority alone only the coordinator does.
    """
    if identity is None and not authority:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    credentials = (
        grpc.ssl_channel_credentials(authority.encode())
        if identity is None
        else grpc.ssl_channel_credentials(
            identity.authority.encode(), identity.key.encode(), identity.certificate.encode()
        )
    )
    name = ("grpc.ssl_target_name_override", host_of(COORDINATOR))
    return grpc.secure_channel(address, credentials, options=(*_CHANNEL_OPTIONS, name))


_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
METHODS = {
    method.name: (method.input_type._concrete_class, method.output_type._concrete_class, method.server_streaming)
    for method in _SERVICE.methods
}


def stub_on(channel: grpc.Channel) -> Any:
    """The calls of a coordinator's service, by their names."""
    stub = SimpleNamespace()
    for name, (request, reply, is_stream) in METHODS.items():
        call = channel.unary_stream if is_stream else channel.unary_unary
        path = f"/{_SERVICE.full_name}/{name}"
        setattr(stub, name, call(path, request.SerializeToString, reply.FromString))
    return stub


def handlers_of(service: object, guarded: Callable[..., Any]) -> Any:
    """What a server of gRPC takes: the methods of an object that answer these calls, each as it is `guarded`."""
    handlers = {}
    for name, (request, reply, is_stream) in METHODS.items():
        handler = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        method = guarded(getattr(service, name), is_stream=is_stream)
        handlers[name] = handler(method, request.FromString, reply.SerializeToString)
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that proves a caller to belong to the job."""
    return ((TOKEN_KEY, token),)


def carries_token(metadata: Sequence[tuple[str, str | bytes]], token: str) -> bool:
    """Whether the metadata of a call holds the job's token. The time it takes tells nothing about the token."""
    given = next((value for key, value in metadata if key == TOKEN_KEY), "")
    given_bytes = given if isinstance(given, bytes) else given.encode()
    return hmac.compare_digest(given_bytes, token.encode())


def unanswered(address: str, error: Any) -> LinkError:
    """What a call amounts to that ended with an error of gRPC's: not ours to call, or nobody there."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return FrameError(f"the coordinator at {address} is another job's: it does not take this job's token")
    return LinkError(f"the coordinator at {address} does not answer ({error.code().name}): {error.details()}")
