"""Notes come out as they went in: floats to the last bit, and as many parameters as a model may have."""

import math
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from quorate.data.indices import NO_INDICES, indices_of
from quorate.data.ledger import NOTHING, Tally
from quorate.replica.losses import LossSum
from quorate.strategies.agreement import WorkerNote
from quorate.training.lane import LaneResult
from quorate.training.strategy import Save, StepRequest

names = st.text(max_size=5)
losses = st.builds(LossSum, total=st.floats(), count=st.floats(0, 1e9), per_item=st.booleans())
lanes = st.builds(
    LaneResult,
    lane=st.integers(0, 1000),
    samples=st.integers(0, 10**9),
    present=st.integers(0, 2**300),
    losses=st.dictionaries(names, losses, max_size=2),
    log=st.dictionaries(names, st.tuples(st.floats(), st.floats(0, 1e9)), max_size=2),
    buffers=st.just({}),
    tally=st.builds(Tally, st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))),
    data_s=st.floats(0, 1e9),
)
requests = st.builds(StepRequest, st.none() | st.text(), st.sampled_from(Save), st.booleans())
digests = st.dictionaries(names, names, max_size=2)
ODD = LossSum(math.nan, math.inf), LossSum(-math.inf, 0.0, True), LossSum(-0.0, 5e-324)
NO_REQUEST = StepRequest()


@given(st.lists(lanes, max_size=3), requests, st.lists(digests, max_size=2))
@example([LaneResult(0, 1, (1 << 40_000) - 1)], NO_REQUEST, [])
@example([LaneResult(2, 0, bad=(7, 3), why=((7, "größe.tar, byte 512: torn"),))], NO_REQUEST, [])
@example(
    [LaneResult(0, 1, 0, {str(i): loss for i, loss in enumerate(ODD)}, {"x": (math.nan, 1.0), "y": (-math.inf, 2.0)})],
    StepRequest("stop"),
    [],
)
def test_notes_survive_the_journey(sent: list[LaneResult], request: StepRequest, changed: list[dict[str, str]]) -> None:
    note = WorkerNote(sent, changed, request, 2**64 - len(sent) - 1, "the digest of settings")
    received = WorkerNote.decode(note.encode())
    assert [lane.present for lane in received.lanes] == [lane.present for lane in sent]
    # The rest as text: a NaN does not equal itself.
    assert [repr(replace(lane, present=0)) for lane in received.lanes] == [
        repr(replace(lane, present=0)) for lane in sent
    ]
    assert (received.request, received.digests, received.state) == (request, changed, note.state)
    assert received.settings == note.settings


def test_the_samples_of_a_lane_travel_only_if_its_loss_is_not_finite() -> None:
    read = indices_of((7, 3))
    fine, poisoned = (LaneResult(0, 2, losses={"": LossSum(loss, 2)}, read=read) for loss in (1.0, math.nan))
    received = WorkerNote.decode(WorkerNote([fine, poisoned], [{}, {}], NO_REQUEST).encode()).lanes
    assert received[0].read is NO_INDICES
    assert received[0].tally == NOTHING
    assert received[1].read.tolist() == [7, 3]
