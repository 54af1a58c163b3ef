"""Which of the checkpoints in a run's folder are its own, and which of them a person means: the last, the best, or that
of a step."""

import logging
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from quorate.checkpoint.listing import CheckpointInfo, Search, Skipped, Unusable
from quorate.checkpoint.retention import BestEvaluation
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, QuorateError, RunError
from quorate.spec.changes import Change, refused_on_resume
from quorate.spec.job import JobSpec
from quorate.spec.override import migrate, without_removed

log = logging.getLogger(__name__)

LAST, BEST = "last", "best"


Foreign = Callable[[CheckpointInfo], str]
"""Says why a checkpoint is none of the run whose folder it lies in; nothing if it is one."""


def select(
    run: str,
    folder: CheckpointFolder,
    which: str | int,
    best: Callable[[], BestEvaluation | None],
    foreign: Foreign = lambda _: "",
) -> CheckpointInfo:
    """The checkpoint of a run that `which` means: ``last``, ``best``, or a step; it is whole.

    `best` says what the run's own record calls its best evaluation: no other is taken for it.
    """
    if which == LAST:
        search = search_own(folder.search, foreign)
        if search.newest is not None:
            return warned_of(search.newest, search.skipped)
        why = f": {search.skipped[0].reason}" if search.skipped else ""
        when = "every `checkpoint.every` steps, at its best evaluation and at its end"
        raise RunError(f"run {run} has no valid checkpoint{why}; it saves one {when}")
    found_here = folder.list()
    infos = own_among(found_here, foreign)
    for info in found_here:
        if info not in infos:
            log.warning("checkpoint %s %s: %s", info.path.name, Unusable.FOREIGN, foreign(info))
    found = best_among(infos, run, best()) if which == BEST else _of_step(infos, run, which)
    try:
        folder.verify(found)
    except CheckpointError as error:
        raise RunError(f"{error}. {_there_are(infos)}") from error
    return found


def saved_job(info: CheckpointInfo) -> JobSpec | None:
    """The job in a checkpoint; None where it is of another version."""
    try:
        return JobSpec.model_validate(without_removed(migrate(info.manifest.job))[0])
    except (ValidationError, QuorateError):
        return None


def changes_since(info: CheckpointInfo, spec: JobSpec) -> tuple[Change, ...]:
    """What a job means otherwise than the one that a checkpoint was saved by. Where the task is does not count."""
    saved = saved_job(info)
    return () if saved is None else tuple(each for each in refused_on_resume(saved, spec) if each.key != "task")


def why_foreign(info: CheckpointInfo, spec: JobSpec) -> str:
    """Why a checkpoint is not one of a job; nothing if it may be."""
    changed = changes_since(info, spec)
    if not changed:
        return ""
    values = ", ".join(f"{each.key} {each.before!r} where the run has {each.after!r}" for each in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"its job has {values}{more}"


def search_own(search: Callable[[Foreign], Search], foreign: Foreign) -> Search:
    """The newest whole checkpoint of the run itself, by this search: of its folder (`CheckpointFolder.search`), or of
    copies. Where none at all is, it is the job that was changed."""
    found = search(foreign)
    if found.newest is None and any(left.kind is Unusable.FOREIGN for left in found.skipped):
        return search(lambda _: "")
    return found


def own_among(infos: Sequence[CheckpointInfo], foreign: Foreign) -> Sequence[CheckpointInfo]:
    """Those of the run itself; all of them where none at all is, by the same rule."""
    return [info for info in infos if not foreign(info)] or infos


def best_among(infos: Sequence[CheckpointInfo], run: str, best: BestEvaluation | None) -> CheckpointInfo:
    """The checkpoint of the best evaluation, and of no other."""
    if best is None:
        raise RunError(f"run {run} has no evaluation yet that could be the best. {_there_are(infos)}")
    # Of two at one step the one that was evaluated is the later; both have the weights that were evaluated.
    found = next((info for info in reversed(infos) if info.cursor.step == best.step), None)
    if found is None:
        raise RunError(
            f"the best evaluation of run {run} is that of step {best.step} ({best.watched.metric} {best.value:.6g}), "
            "whose checkpoint is not there: it is still being saved, was removed, or is in another copy of the run. "
            f"{_there_are(infos)} Choose one of them by its step"
        )
    return found


def warned_of(newest: CheckpointInfo, skipped: Sequence[Skipped]) -> CheckpointInfo:
    """The newest whole checkpoint, after a warning of each newer one that cannot be used."""
    for left in skipped:
        log.warning("checkpoint %s %s, so %s is used: %s", left.path.name, left.kind, newest.path.name, left.reason)
    return newest


def _of_step(infos: Sequence[CheckpointInfo], run: str, which: str | int) -> CheckpointInfo:
    text = str(which).strip()
    if not text.isdecimal():
        raise RunError(f"'{which}' is not a checkpoint: give a step, {LAST} or {BEST}. {_there_are(infos)}")
    # Of two at one step the one that was evaluated is the later.
    found = next((info for info in reversed(infos) if info.cursor.step == int(text)), None)
    if found is None:
        raise RunError(f"run {run} has no checkpoint of step {int(text)}. {_there_are(infos)}")
    return found


def _there_are(infos: Sequence[CheckpointInfo]) -> str:
    steps = sorted({info.cursor.step for info in infos})
    return f"There are those of steps {', '.join(map(str, steps))}." if steps else "It has no checkpoint at all."
