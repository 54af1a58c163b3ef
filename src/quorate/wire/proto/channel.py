"""How a coordinator is called (the channel to it, the token that goes with every call, a call without answer), and core
values as messages."""

import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import grpc

from quorate.core.errors import FrameError, LinkError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Pace, Phase, Position, Role
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


# --- values of the core as messages, and back


def encode_generation(generation: Generation) -> pb.Generation:
    """A generation as its message."""
    members = [
        pb.Member(
            worker=member.worker,
            address=member.address,
            first_lane=member.lanes.start,
            lane_count=len(member.lanes),
            local_address=member.local_address,
            cursor=encode_cursor(member.cursor),
            role=member.role,
            part=member.part,
        )
        for member in generation.members
    ]
    restored = None if generation.restored is None else encode_cursor(generation.restored)
    return pb.Generation(id=encode_id(generation.id), members=members, restored=restored)


def decode_generation(message: pb.Generation) -> Generation:
    """The generation that a message tells."""
    members = tuple(
        Member(
            member.worker,
            member.address,
            range(member.first_lane, member.first_lane + member.lane_count),
            member.local_address,
            decode_cursor(member.cursor),
            Role(member.role or Role.WORKER),
            member.part if member.HasField("part") else None,
        )
        for member in message.members
    )
    restored = decode_cursor(message.restored) if message.HasField("restored") else None
    return Generation(decode_id(message.id), members, restored)


def encode_cursor(cursor: Cursor) -> pb.Cursor:
    """A cursor as its message."""
    return pb.Cursor(step=cursor.step, phase=int(cursor.phase))


def decode_cursor(message: pb.Cursor) -> Cursor:
    """The cursor that a message tells; the beginning when it is absent."""
    return Cursor(message.step, Phase(message.phase))


def encode_id(generation: GenerationId) -> pb.GenerationId:
    """The id of a generation as its message."""
    return pb.GenerationId(incarnation=generation.incarnation, number=generation.number)


def decode_id(message: pb.GenerationId) -> GenerationId:
    """The id that a message tells; (0, 0) when it is absent."""
    return GenerationId(message.incarnation, message.number)


def encode_position(position: Position) -> pb.Position:
    """A position as its message."""
    generation = encode_generation(position.generation) if position.generation else None
    cursor = encode_cursor(position.cursor)
    return pb.Position(
        generation=generation, cursor=cursor, has_left=position.has_left, has_trained=position.has_trained
    )


def decode_position(message: pb.Position) -> Position:
    """The position that a message tells."""
    generation = decode_generation(message.generation) if message.HasField("generation") else None
    return Position(generation, decode_cursor(message.cursor), message.has_left, message.has_trained)


def encode_pace(pace: Pace | None) -> pb.Pace | None:
    """A pace as its message."""
    return None if pace is None else pb.Pace(**asdict(pace))


def decode_pace(message: pb.Pace) -> Pace:
    """The pace that a message tells."""
    return Pace(message.steps, message.lanes, message.data_s, message.compute_s, message.apply_s)


def encode_failure(failure: Failure | None) -> str:
    """A failure as JSON text; none is empty."""
    return "" if failure is None else json.dumps(failure.to_dict())


def decode_failure(text: str) -> Failure | None:
    """The failure that JSON text tells; empty is none."""
    return Failure.from_dict(json.loads(text)) if text else None
