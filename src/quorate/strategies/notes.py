"""What workers tell each other at each step besides gradients: a few numbers for each hosted lane, as JSON."""

import json
from dataclasses import dataclass

from quorate.data.ledger import Tally
from quorate.training.device import CPU, Device, digests
from quorate.training.lane import LaneResult, LossSum, not_finite


@dataclass(frozen=True)
class LaneNote:
    """A lane's result without its tensors: of changed buffers only the digests travel. `suspects` are the samples of a
    lane whose loss is not finite, `bad` those that could not be read, `why` what is wrong with the first of these, and
    `data_s` the seconds that its worker has waited for its samples, `put_back` the names of what user code assigned."""

    lane: int
    samples: int
    present: int
    losses: dict[str, LossSum]
    log: dict[str, float]
    buffers: dict[str, str]
    tally: Tally
    suspects: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    data_s: float = 0.0
    put_back: tuple[str, ...] = ()


def note_of(result: LaneResult, device: Device = CPU) -> LaneNote:
    """What to tell about a lane."""
    suspects = () if not_finite(result.losses) is None else tuple(result.read.tolist())
    return LaneNote(
        result.lane,
        result.samples,
        result.present,
        result.losses,
        result.log,
        digests(result.buffers.items(), device),
        result.tally,
        suspects,
        result.bad,
        result.why,
        result.data_s,
        result.put_back,
    )


@dataclass(frozen=True)
class WorkerNote:
    """What a worker tells: of its lanes, its wish to stop, and a digest of the slice of its state whose turn it is."""

    lanes: list[LaneNote]
    stop: str | None
    state: int = 0


def encode(told: WorkerNote) -> bytes:
    """One worker's note. Floats survive JSON exactly."""
    lanes = [
        [
            note.lane,
            note.samples,
            hex(note.present),  # Python refuses to write an integer of more than 4300 decimal digits
            {name: [loss.total, loss.count, loss.per_item] for name, loss in note.losses.items()},
            note.log,
            note.buffers,
            str(note.tally),
            note.suspects,
            note.bad,
            note.why,
            note.data_s,
            note.put_back,
        ]
        for note in told.lanes
    ]
    return json.dumps({"stop": told.stop, "state": told.state, "lanes": lanes}).encode()


def decode(payload: bytes) -> WorkerNote:
    """Another worker's note."""
    told = json.loads(payload)
    notes = [
        LaneNote(
            lane,
            samples,
            int(present, 16),
            {name: LossSum(*loss) for name, loss in losses.items()},
            log,
            buffers,
            Tally.from_hex(tally),
            tuple(suspects),
            tuple(bad),
            tuple((index, text) for index, text in why),
            data_s,
            tuple(put_back),
        )
        for lane, samples, present, losses, log, buffers, tally, suspects, bad, why, data_s, put_back in told["lanes"]
    ]
    return WorkerNote(notes, told["stop"], told["state"])
