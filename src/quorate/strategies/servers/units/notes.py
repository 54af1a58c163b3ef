"""What is known of a unit besides its gradient, and what the units of a step come to."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from quorate.data.ledger import total
from quorate.strategies.agreement import WorkerNote, mean_log, skipped_of, total_losses
from quorate.training.lane import LaneResult
from quorate.training.losses import not_finite
from quorate.training.strategy import NOTHING_ASKED, Agreement


@dataclass(frozen=True)
class UnitNote:
    """The result of a lane, and the norms of its gradient by optimizer, before clipping."""

    result: LaneResult
    norms: dict[str, float] = field(default_factory=dict)

    @property
    def is_skipped(self) -> bool:
        """Whether its loss is not finite: it has no gradient then, and counts as applied."""
        return not_finite(self.result.losses) is not None

    def encode(self) -> str:
        return json.dumps([WorkerNote([self.result], [], NOTHING_ASKED).encode().decode(), self.norms])

    @classmethod
    def decode(cls, told: str) -> "UnitNote":
        note, norms = json.loads(told)
        return cls(WorkerNote.decode(note.encode()).lanes[0], norms)


def agreement_of(notes: Sequence[UnitNote]) -> tuple[Agreement, dict[str, float]]:
    """What all units of a step come to, and the mean of their norms by samples.

    A unit whose loss is not finite is left out, and only that unit: the others of its step are applied already.
    """
    lanes = [note.result for note in notes]
    good = [note for note in notes if not note.is_skipped]
    poisoned = [note.result for note in notes if note.is_skipped]
    used = [note.result for note in good]
    samples = sum(lane.samples for lane in used)
    agreement = Agreement(
        samples=samples,
        tally=total(lane.tally for lane in lanes),
        present=0,
        losses=total_losses(used),
        log=mean_log(used),
        buffers={},
        request=NOTHING_ASKED,
        skipped=skipped_of(poisoned, is_partial=bool(samples)) if poisoned else None,
        bad=tuple(sample for lane in lanes for sample in lane.bad),
        why=tuple(reason for lane in lanes for reason in lane.why),
        data_s=max(lane.data_s for lane in lanes),
        put_back=tuple(sorted({name for lane in lanes for name in lane.put_back})),
    )
    norms: dict[str, float] = {}
    for note in good:
        for name, norm in note.norms.items():
            norms[name] = norms.get(name, 0.0) + norm * note.result.samples / samples
    return agreement, norms
