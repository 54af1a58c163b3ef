"""What workers tell each other at each step besides gradients: a few numbers for each hosted lane, as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quorate.core.digests import tensor_digest
from quorate.training.lane import LaneResult, LossSum
from quorate.training.tensors import named_bytes


@dataclass(frozen=True)
class LaneNote:
    """A lane's result without its tensors: of changed buffers only the digests travel."""

    lane: int
    samples: int
    present: int
    losses: dict[str, LossSum]
    log: dict[str, float]
    buffers: dict[str, str]


def note_of(result: LaneResult) -> LaneNote:
    """What to tell about a lane."""
    buffers = {name: tensor_digest(named_bytes(name, value)) for name, value in result.buffers.items()}
    return LaneNote(result.lane, result.samples, result.present, result.losses, result.log, buffers)


def encode(notes: Sequence[LaneNote], stop: str | None) -> bytes:
    """One worker's notes. Floats survive JSON exactly."""
    lanes = [
        [
            note.lane,
            note.samples,
            hex(note.present),  # Python refuses to write an integer of more than 4300 decimal digits
            {name: [loss.total, loss.count, loss.per_item] for name, loss in note.losses.items()},
            note.log,
            note.buffers,
        ]
        for note in notes
    ]
    return json.dumps({"stop": stop, "lanes": lanes}).encode()


def decode(payload: bytes) -> tuple[list[LaneNote], str | None]:
    """Another worker's notes."""
    told = json.loads(payload)
    notes = [
        LaneNote(lane, samples, int(present, 16), {name: LossSum(*loss) for name, loss in losses.items()}, log, buffers)
        for lane, samples, present, losses, log, buffers in told["lanes"]
    ]
    return notes, told["stop"]
