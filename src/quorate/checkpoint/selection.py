"""Which of a run's checkpoints a person means: the last, the best, or that of a step."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quorate.checkpoint.listing import CheckpointInfo, Search, Skipped
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.cursor import Phase
from quorate.core.errors import CheckpointError, RunError
from quorate.spec.job import JobSpec

log = logging.getLogger(__name__)

LAST, BEST = "last", "best"


@dataclass(frozen=True)
class Ranking:
    """What makes an evaluated checkpoint the best: the lowest or the highest value of a metric."""

    metric: str
    mode: str

    @classmethod
    def of(cls, spec: JobSpec) -> "Ranking":
        """What a job holds for its best."""
        return cls(spec.evaluate.metric or "loss", spec.evaluate.mode)

    def best(self, infos: list[CheckpointInfo]) -> CheckpointInfo | None:
        """The best of these, the earlier of two equals. One that was not evaluated itself has no metrics of its own,
        and one whose metric is not a number is never the best."""
        ranked = [
            info
            for info in infos
            if info.cursor.phase is Phase.EVALUATED and not math.isnan(info.manifest.metrics.get(self.metric, math.nan))
        ]
        sign = 1 if self.mode == "min" else -1
        return min(ranked, key=lambda info: (sign * info.manifest.metrics[self.metric], info.cursor), default=None)


def select(run: str, folder: CheckpointFolder, which: str | int, ranking: Ranking) -> CheckpointInfo:
    """The checkpoint of a run that `which` means: ``last``, ``best``, or a step; it is whole."""
    if which == LAST:
        return _newest(run, folder.search())
    infos = list(folder.list())
    found = ranking.best(infos) if which == BEST else _of_step(infos, run, which)
    if found is None:
        raise RunError(
            f"no checkpoint of run {run} was saved at an evaluation with the metric '{ranking.metric}', "
            f"so none is the best. {_there_are(infos)}"
        )
    try:
        folder.verify(found)
    except CheckpointError as error:
        raise RunError(f"{error}. {_there_are(infos)}") from error
    return found


def _newest(run: str, search: Search) -> CheckpointInfo:
    if search.newest is None:
        why = f": {search.skipped[0].reason}" if search.skipped else ""
        raise RunError(
            f"run {run} has no whole checkpoint{why}; it saves one every `checkpoint.every` steps and at its end"
        )
    return warned_of(search.newest, search.skipped)


def warned_of(newest: CheckpointInfo, skipped: Sequence[Skipped]) -> CheckpointInfo:
    """The newest whole checkpoint, after a warning of each newer one that cannot be used."""
    for left in skipped:
        log.warning("checkpoint %s %s, so %s is used: %s", left.path.name, left.kind, newest.path.name, left.reason)
    return newest


def _of_step(infos: list[CheckpointInfo], run: str, which: str | int) -> CheckpointInfo:
    text = str(which).strip()
    if not text.isdecimal():
        raise RunError(f"'{which}' is no checkpoint: give a step, {LAST} or {BEST}. {_there_are(infos)}")
    # Of two at one step the one that was evaluated is the later.
    found = next((info for info in reversed(infos) if info.cursor.step == int(text)), None)
    if found is None:
        raise RunError(f"run {run} has no checkpoint of step {int(text)}. {_there_are(infos)}")
    return found


def _there_are(infos: list[CheckpointInfo]) -> str:
    steps = sorted({info.cursor.step for info in infos})
    return f"There are those of steps {', '.join(map(str, steps))}." if steps else "It has no checkpoint at all."
