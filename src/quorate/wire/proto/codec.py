"""Values of the core as messages, and back."""

import json
from dataclasses import asdict

from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Phase, Role
from quorate.core.worker_status import Pace, Position
from quorate.wire.proto import coordinator_pb2 as pb


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
