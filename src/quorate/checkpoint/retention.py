"""Which checkpoints stay, and why; all others may go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from quorate.core.cursor import Cursor

NOT_TOLD: Mapping[Cursor, int | None] = MappingProxyType({})


class Reason(StrEnum):
    """Why a checkpoint stays."""

    LAST = "last"  # it is one of the last `keep`
    BEST = "best"  # it is of the step of the best evaluation
    BEST_SAVED = "best saved"  # the best evaluation itself was not saved, and this was the best before it
    EVERY = "every"  # its step is a multiple of `keep_every`
    WAY_BACK = "newest whole"  # all that were saved after it are damaged


@dataclass(frozen=True)
class Retention:
    """What a job says about keeping checkpoints: the last `keep`, and for ever every `keep_every`-th step."""

    keep: int
    keep_every: int | None = None


def best_saved(saved: Sequence[Cursor], bests: Mapping[Cursor, int | None]) -> int | None:
    """The best by the word of the newest whose best is among these; `bests` tells which was the best at each."""
    steps = {cursor.step for cursor in saved}
    return next((step for cursor in sorted(saved, reverse=True) if (step := bests.get(cursor)) in steps), None)


def reasons(
    saved: Sequence[Cursor],
    retention: Retention,
    best: int | None,
    newest_whole: Cursor | None,
    bests: Mapping[Cursor, int | None] = NOT_TOLD,
) -> Mapping[Cursor, tuple[Reason, ...]]:
    """Why each checkpoint stays, oldest first; no reason means that it may go.

    `best` is the step of the best evaluation; where that was not saved, the one before it stays, by `bests`: which step
    was the best when each was saved. The last ones may all be damaged: without `newest_whole` retention would then
    delete the only way back.
    """
    in_order = sorted(saved)
    steps = {cursor.step for cursor in in_order}
    stand_in = None
    if best is not None and best not in steps:
        stand_in = best_saved(in_order, bests)
    last = set(in_order[max(0, len(in_order) - retention.keep) :])

    def holds(cursor: Cursor, reason: Reason) -> bool:
        match reason:
            case Reason.LAST:
                return cursor in last
            case Reason.BEST:
                return cursor.step == best
            case Reason.BEST_SAVED:
                return stand_in is not None and cursor.step == stand_in
            case Reason.EVERY:
                return retention.keep_every is not None and cursor.step % retention.keep_every == 0
            case Reason.WAY_BACK:
                return cursor == newest_whole and cursor not in last

    return {cursor: tuple(reason for reason in Reason if holds(cursor, reason)) for cursor in in_order}


def surplus(
    saved: Sequence[Cursor],
    retention: Retention,
    best: int | None,
    newest_whole: Cursor | None,
    bests: Mapping[Cursor, int | None] = NOT_TOLD,
) -> tuple[Cursor, ...]:
    """The checkpoints that nothing keeps, oldest first. Where none is known to be whole, nothing goes."""
    if newest_whole is None:
        return ()
    return tuple(cursor for cursor, why in reasons(saved, retention, best, newest_whole, bests).items() if not why)
