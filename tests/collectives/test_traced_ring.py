from typing import Any

import pytest
import torch

from collectives.rings import everywhere, memory_rings
from quorate.collectives.ring import Ring
from quorate.core.spans import BUCKET, GATHER, RECEIVE, SEND, SpanRecorder
from quorate.lanes.chunks import host_lanes, plan_exchange

FIRST = 10
"""The number of the first worker."""
CASES = [(lanes, workers) for lanes in range(2, 6) for workers in range(2, lanes + 1)]


@pytest.mark.parametrize(("lanes", "workers"), CASES)
def test_every_hop_is_recorded_at_both_ends(lanes: int, workers: int) -> None:
    hosting = host_lanes(lanes, workers)
    recorders = [SpanRecorder("step") for _ in range(workers)]
    with memory_rings(lanes, workers) as rings:
        for ring, recorder in zip(rings, recorders, strict=True):
            ring.spans = recorder

        def work(position: int, ring: Ring) -> None:
            ring.all_reduce(1, 7, [torch.ones(11) for _ in hosting[position]], torch.empty(11))
            ring.gather(1, 2, b"note")

        everywhere(rings, work)
    sent, received = set[tuple[Any, ...]](), set[tuple[Any, ...]]()
    for position, recorder in enumerate(recorders):
        spans = recorder.take()
        for span in spans:
            where = {name: value for name, value in span.attributes.items() if name != "peer"}
            if span.name == SEND:
                assert span.attributes["peer"] == FIRST + (position + 1) % workers
                sent.add((position, *sorted(where.items())))
            elif span.name == RECEIVE:
                assert span.attributes["peer"] == FIRST + (position - 1) % workers
                received.add((span.attributes["peer"] - FIRST, *sorted(where.items())))
                assert spans[span.parent].name == (BUCKET if "bucket" in where else GATHER)
    planned = {
        (position, ("bucket", 7), ("chunk", visit.chunk), ("hop", visit.round + 1))
        for position, visits in enumerate(plan_exchange(hosting))
        for visit in visits
        if visit.sends
    }
    assert {hop for hop in sent if hop[1][0] == "bucket"} == planned
    assert received == sent
    assert len(sent - planned) == workers * (workers - 1)


def test_nothing_is_recorded_of_other_steps() -> None:
    recorder = SpanRecorder("step")
    with memory_rings(2, 2) as rings:
        rings[0].spans = recorder
        everywhere(rings, lambda _, ring: ring.all_reduce(1, 0, [torch.ones(4)], torch.empty(4)))
        before = len(recorder.take())
        rings[0].spans = None
        everywhere(rings, lambda _, ring: ring.all_reduce(2, 0, [torch.ones(4)], torch.empty(4)))
    assert before > 1
    assert len(recorder.take()) == before
