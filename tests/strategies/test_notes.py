"""Notes come out as they went in: floats to the last bit, and as many parameters as a model may have."""

import math
from dataclasses import replace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quorate.data.ledger import NOTHING, Tally
from quorate.strategies.notes import LaneNote, WorkerNote, decode, encode, note_of
from quorate.training.lane import LaneResult, LossSum

names = st.text(max_size=5)
losses = st.builds(LossSum, total=st.floats(), count=st.floats(0, 1e9), per_item=st.booleans())
notes = st.builds(
    LaneNote,
    lane=st.integers(0, 1000),
    samples=st.integers(0, 10**9),
    present=st.integers(0, 2**300),
    losses=st.dictionaries(names, losses, max_size=2),
    log=st.dictionaries(names, st.floats(), max_size=2),
    buffers=st.dictionaries(names, names, max_size=2),
    tally=st.builds(Tally, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    data_s=st.floats(0, 1e9),
)
ODD = LossSum(math.nan, math.inf), LossSum(-math.inf, 0.0, True), LossSum(-0.0, 5e-324)


@given(st.lists(notes, max_size=3), st.none() | st.text())
@example([LaneNote(0, 1, (1 << 40_000) - 1, {}, {}, {}, NOTHING)], None)
@example([LaneNote(2, 0, 0, {}, {}, {}, NOTHING, (), (7, 3), ((7, "größe.tar, byte 512: torn"),))], None)
@example(
    [LaneNote(0, 1, 0, {str(i): loss for i, loss in enumerate(ODD)}, {"x": math.nan, "y": -math.inf}, {}, NOTHING)],
    "stop",
)
def test_notes_survive_the_journey(told: list[LaneNote], stop: str | None) -> None:
    sent = WorkerNote(told, stop, 2**64 - len(told) - 1)
    decoded = decode(encode(sent))
    heard = decoded.lanes
    assert [note.present for note in heard] == [note.present for note in told]
    # The rest as text: a NaN does not equal itself.
    assert [repr(replace(note, present=0)) for note in heard] == [repr(replace(note, present=0)) for note in told]
    assert (decoded.stop, decoded.state) == (stop, sent.state)


def result(table: torch.Tensor) -> LaneResult:
    return LaneResult(3, 5, 0b101, {"": LossSum(1.0, 5.0)}, {"x": 2.0}, {"table": table}, Tally.of(0, (1, 2)))


def test_of_buffers_only_a_digest_of_name_type_shape_and_bits_travels() -> None:
    note = note_of(result(torch.tensor([0.0, 1.0])))
    assert (note.lane, note.samples, note.present, note.log) == (3, 5, 0b101, {"x": 2.0})
    assert note.tally == Tally.of(0, (1, 2))
    assert note_of(result(torch.tensor([0.0, 1.0]))) == note
    others = [torch.tensor([-0.0, 1.0]), torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, 1.0], dtype=torch.float64)]
    assert len({note.buffers["table"], *(note_of(result(other)).buffers["table"] for other in others)}) == 4
