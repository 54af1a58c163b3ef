"""The bytes that a worker tells of are those of one step."""

from types import MappingProxyType
from typing import Any

from quorate.core.generation import Generation, GenerationId, Member
from quorate.strategies.servers.compress import LaneEncoder


class Counting:
    """What an exchange has sent and received so far."""

    lanes: Any = MappingProxyType({})
    compressors: Any = ()
    pushed_dense = 1000
    bytes_sent = bytes_received = 0

    def step(self) -> None:
        self.bytes_sent += 100
        self.bytes_received += 30


def test_a_void_step_before_it_is_not_counted() -> None:
    exchange: Any = Counting()
    nothing: Any = None
    encoder, own = LaneEncoder(exchange, nothing, None), Member(0, "", range(1))
    for step in (1, 2):
        encoder.encode(step, [])
        exchange.step()
    told = encoder.traffic(2, Generation(GenerationId(1, 1), (own,)), own)
    assert (told.sent_bytes, told.received_bytes) == (100, 30)
