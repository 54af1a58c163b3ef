"""Who a worker is, as it tells its coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quorate.core.cursor import Cursor
from quorate.core.worker_status import Position
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import encode_cursor, encode_position


@dataclass(frozen=True)
class Registration:
    """Who a worker is, and what it starts from. `slot` is the worker id that it wishes for."""

    slot: int
    pid: int
    host: str
    ring_address: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    local_address: str = ""

    def request(self, position: Position | None = None) -> pb.RegisterRequest:
        """To ask for its place; with a position, to come back to it."""
        request = pb.RegisterRequest(
            slot=self.slot,
            pid=self.pid,
            host=self.host,
            ring_address=self.ring_address,
            local_address=self.local_address,
            facts=dict(self.facts),
            tensors=[pb.TensorDigest(name=name, digest=digest) for name, digest in self.tensors.items()],
            cursor=encode_cursor(self.cursor),
        )
        if position is not None:
            request.position.CopyFrom(encode_position(position))
        return request
