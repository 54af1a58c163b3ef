"""The best evaluation of a run, and which checkpoints stay and why; all others may go."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeGuard

from quorate.core.generation import Cursor

NOT_TOLD: Mapping[Cursor, int | None] = MappingProxyType({})


@dataclass(frozen=True)
class Watched:
    """The metric that says which model is the best, and whether the lowest or the highest value is (min or max)."""

    metric: str
    mode: str

    @classmethod
    def by(cls, job: Mapping[str, Any]) -> "Watched":
        """By default the lowest loss."""
        evaluate = job.get("evaluate")
        keys = evaluate if isinstance(evaluate, dict) else {}
        return cls(str(keys.get("metric") or "loss"), "max" if keys.get("mode") == "max" else "min")


@dataclass(frozen=True)
class BestEvaluation:
    """The best value of the watched metric, and the step of its evaluation."""

    watched: Watched
    value: float
    step: int

    @property
    def rank(self) -> float:
        """The lower, the better."""
        return self.value if self.watched.mode == "min" else -self.value


def best_of(evaluations: Mapping[int, Mapping[str, Any]], watched: Watched) -> BestEvaluation | None:
    """The best of these, the earlier of two equals; one that is not a number is never the best."""
    found = [
        BestEvaluation(watched, float(value), step)
        for step, metrics in evaluations.items()
        if is_number(value := metrics.get(watched.metric)) and not math.isnan(value)
    ]
    return better_of(found)


def better_of(found: Iterable[BestEvaluation | None]) -> BestEvaluation | None:
    """The best of those that there are, the earlier of two equals."""
    return min(filter(None, found), key=lambda best: (best.rank, best.step), default=None)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value that was read from a file is a number, and not true or false."""
    return type(value) in (int, float)


class Reason(StrEnum):
    """Why a checkpoint stays."""

    LAST = "last"  # it is one of the last `keep`
    BEST = "best"  # it is of the step of the best evaluation
    BEST_SAVED = "best saved"  # the best evaluation itself was not saved, and this was the best before it
    EVERY = "every"  # its step is a multiple of `keep_every`
    WAY_BACK = "newest whole"  # all that were saved after it are damaged
    AUDITED = "audited"  # what was saved after it is not covered by an audit of every worker


@dataclass(frozen=True)
class Retention:
    """What a job says about keeping checkpoints: the last `keep`, and for ever every `keep_every`-th step. Also the
    newest of at most the step until which all workers are `audited`: if one turns out to be wrong, that is the way
    back."""

    keep: int
    keep_every: int | None = None
    audited: int | None = None


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
    last: set[Cursor | None] = set(in_order[max(0, len(in_order) - retention.keep) :])

    every, audited = retention.keep_every, retention.audited
    before = [cursor for cursor in in_order if audited is not None and cursor.step <= audited]
    kept: dict[Reason, set[Cursor | None]] = {
        Reason.LAST: last,
        Reason.BEST: {cursor for cursor in in_order if cursor.step == best},
        Reason.BEST_SAVED: {cursor for cursor in in_order if cursor.step == stand_in},
        Reason.EVERY: {cursor for cursor in in_order if every is not None and cursor.step % every == 0},
        Reason.WAY_BACK: {newest_whole} - last,
        Reason.AUDITED: {max(before, default=None)},
    }
    return {cursor: tuple(reason for reason in Reason if cursor in kept[reason]) for cursor in in_order}


def surplus(
    saved: Sequence[Cursor],
    retention: Retention,
    best: int | None,
    newest_whole: Cursor | None,
    bests: Mapping[Cursor, int | None] = NOT_TOLD,
    coming: Cursor | None = None,
) -> tuple[Cursor, ...]:
    """The checkpoints that nothing keeps, oldest first. Where none is known to be whole, nothing goes.

    With `coming`, what nothing keeps once that one is saved too. It may come to nothing: so what is the best without it
    stays, and so does whatever is newer than `newest_whole`: it may be whole, too.
    """
    if newest_whole is None:
        return ()
    now = reasons(saved, retention, best, newest_whole, bests)
    if coming is None:
        return tuple(cursor for cursor, why in now.items() if not why)
    then = reasons([*saved, coming], retention, best, newest_whole, bests)
    as_best = {Reason.BEST, Reason.BEST_SAVED}
    return tuple(
        cursor for cursor, why in now.items() if cursor < newest_whole and not then[cursor] and not as_best & {*why}
    )
