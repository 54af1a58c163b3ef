"""The bytes that a worker tells of are those of one step."""

from types import SimpleNamespace
from typing import Any

from quorate.core.generation import Generation, GenerationId, Member
from quorate.strategies.compression.methods import TopK
from quorate.strategies.servers.compress import EncodedExchange


def test_a_void_step_before_it_is_not_counted() -> None:
    own = Member(0, "", range(1))
    gradients: Any = None
    spokes: Any = SimpleNamespace(generation=Generation(GenerationId(1, 1), (own,)), servers=())
    exchange = EncodedExchange(spokes, (), (), (), TopK(0.5), tells_deltas=True)
    for step in (1, 2):
        exchange.encode(step, [], gradients, None)
        exchange.bytes_sent += 100
        exchange.bytes_received += 30
    told = exchange.traffic(2, own)
    assert (told.sent_bytes, told.received_bytes) == (100, 30)
