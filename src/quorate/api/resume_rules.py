"""Whether a run can be resumed as it is asked to, and from which checkpoint."""

import logging
import shlex
from collections.abc import Sequence

from quorate.api.recorded_run import run_argument, short_path
from quorate.checkpoint.listing import CheckpointInfo, Skipped, Unusable, survey
from quorate.checkpoint.selection import changes_since, search_own, warned_of, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, DamagedFileError, RunError
from quorate.observe.events import CheckpointSaved
from quorate.observe.tail import EventTail
from quorate.spec.change import Change, refused_on_resume
from quorate.spec.job import CheckpointSpec, JobSpec
from quorate.spec.override import DEFAULT
from quorate.spec.problems import in_brackets
from quorate.spec.resolved import ResolvedJob
from quorate.spec.rules import OWN_PLACE
from quorate.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

EARLY_STOP = "early stop"


def refuse_other_meaning(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> None:
    """Refuse what would make the run produce something else, with both values and who asks for it."""
    changed = [change for change in refused_on_resume(recorded.spec, resolved.spec) if not is_moved_task(change)]
    if not changed:
        return
    if {change.key for change in changed} <= {"epochs", "steps"}:
        raise RunError(f"run {run.name} {_why_not_this_long(run_argument(run), recorded.spec, resolved)}")
    raise RunError(
        f"run {run.name} means something else than what is asked for now: {listed(changed, resolved)}. "
        "Resume without the change, or start a new run from its checkpoint with --branch."
    )


def is_moved_task(change: Change) -> bool:
    """A task may lie elsewhere, and under another name. Its code is compared by itself."""
    return change.key == "task" and _class_of(change.before) == _class_of(change.after)


def _class_of(reference: object) -> str:
    return str(reference).rpartition(":")[2]


def listed(changed: Sequence[Change], resolved: ResolvedJob) -> str:
    """Changed keys with both values, and who asks for the new ones."""
    return "; ".join(f"{change}{in_brackets(_origin(resolved, change.key))}" for change in changed)


def _why_not_this_long(run: str, recorded: JobSpec, asked: ResolvedJob) -> str:
    unit, length = ("epochs", recorded.epochs) if recorded.steps is None else ("steps", recorded.steps)
    other, wanted = ("epochs", asked.spec.epochs) if asked.spec.steps is None else ("steps", asked.spec.steps)
    said = f"{other}: {wanted}{in_brackets(_origin(asked, other))}"
    if unit == other:
        return (
            f"trains for {length} {unit}, and a run can be made longer but not shorter: {said}. "
            "To train less, start a new run with quorate train."
        )
    return (
        f"counts in {unit} ({unit}: {length}), so it cannot be asked for {said}. "
        f"Ask for more {unit}: quorate resume {run} --{unit} {2 * (length or 1)}; "
        f"or start a new run from its checkpoint: quorate resume {run} --branch --{other} {wanted}"
    )


def _origin(resolved: ResolvedJob, key: str) -> str:
    """Where a key was said; of a section, where the first of its keys was."""
    said = (origin for path, origin in resolved.origins.items() if f"{path}.".startswith(f"{key}."))
    return next((origin for origin in said if origin != DEFAULT), "")


def warn_of_damaged_result(run: RunFolder) -> None:
    """Warn that nobody knows how the run ended: what its checkpoints hold can be gone on from all the same."""
    try:
        run.read_result()
    except DamagedFileError as error:
        log.warning("%s", error)


def refuse_complete(run: RunFolder, recorded: JobSpec, asked: JobSpec) -> None:
    """Refuse to go on with what is done, unless more of it is asked for."""
    result = run.whole_result() or {}
    if result.get("status") == "complete" and (asked.steps, asked.epochs) == (recorded.steps, recorded.epochs):
        flag = f"--steps {2 * recorded.steps}" if recorded.steps else f"--epochs {2 * (recorded.epochs or 1)}"
        raise RunError(
            f"run {run.name} is complete ({result.get('steps')} steps). "
            f"To train further, ask for more: quorate resume {run_argument(run)} {flag}"
        )


def refuse_early_stopped(run: RunFolder, recorded: JobSpec, asked: JobSpec, branch: bool) -> None:
    """However many steps are asked for: its patience is at its end, so it would end again where it begins."""
    result = run.whole_result() or {}
    if result.get("ending") != EARLY_STOP or (branch and asked.early_stop != recorded.early_stop):
        return
    why = recorded.early_stop
    rule = f"early_stop: {why.metric}, patience {why.patience}" if why else "early_stop"
    raise RunError(
        f"run {run.name} stopped early ({rule}) after {result.get('steps')} steps; start a branch without early_stop: "
        f"quorate resume {run_argument(run)} --branch --set early_stop=null"
    )


def warn_of_stretched_schedule(recorded: JobSpec, asked: JobSpec) -> None:
    """Warn that a longer job has another learning rate from here on."""
    is_longer = (asked.steps, asked.epochs) != (recorded.steps, recorded.epochs)
    if is_longer and asked.schedule is not None and asked.schedule.kind != "constant":
        log.warning(
            "the rate of a %s schedule depends on how long the job is, so from here on it differs from that of a job "
            "that was this long from the start",
            asked.schedule.kind,
        )


def newest_checkpoint(run: RunFolder, recorded: JobSpec, rules: CheckpointSpec) -> CheckpointInfo:
    """The newest whole checkpoint of the run, under the job's key if it has one; what was skipped is warned of."""
    try:
        folder = CheckpointFolder.of_job(run.checkpoints, rules)
    except CheckpointError as error:
        raise RunError(error.message) from None
    search = search_own(folder.search, lambda info: why_foreign(info, recorded))
    for left in search.skipped:
        if left.kind is Unusable.NEWER:
            raise RunError(_why_not_older(run, left, search.newest))
    if search.newest is None:
        raise RunError(f"run {run.name} has nothing to go on from: {_why_nothing(run, recorded, search.skipped)}")
    return warned_of(search.newest, search.skipped)


def refuse_lost_checkpoints(run: RunFolder, recorded: JobSpec, purpose: str) -> None:
    """Refuse a run whose checkpoints are all gone although it has saved some: they were removed, or not copied."""
    if not survey(run.checkpoints) and (step := _last_saved(run)) is not None:
        raise RunError(f"run {run.name} has nothing to {purpose}: {_why_gone(run, recorded, step)}")


def refuse_edited_job(run: RunFolder, checkpoint: CheckpointInfo, resolved: ResolvedJob) -> None:
    """Refuse a job file that was changed in the run folder: the checkpoint knows what was trained until then.

    Where the task is does not count: a project may be moved, and its source is compared by itself.
    """
    changed = changes_since(checkpoint, resolved.spec)
    if changed:
        owner = checkpoint.manifest.job.get("name")
        other = f", or that is a checkpoint of another run (of job {owner})" if owner != resolved.spec.name else ""
        raise RunError(
            f"{short_path(run.job_file)} was changed since checkpoint {checkpoint.path.name} was saved{other}: "
            f"{listed(changed, resolved)}. Restore it, or start a new run from the checkpoint with --branch."
        )


def _why_not_older(run: RunFolder, newer: Skipped, newest: CheckpointInfo | None) -> str:
    """Going back would undo the steps in between, which nobody has asked for."""
    instead = "" if newest is None else f", or move {short_path(newer.path)} away to go on from {newest.path.name}"
    return f"checkpoint {newer.path.name} of run {run.name} {newer.reason}. Resume with that version{instead}."


def _why_nothing(run: RunFolder, recorded: JobSpec, skipped: Sequence[Skipped]) -> str:
    if not skipped:
        step = _last_saved(run)
        if step is not None:
            return _why_gone(run, recorded, step)
        return (
            "it ended before its first checkpoint. Start it anew with quorate train; "
            "`checkpoint: {every: N}` saves every N steps."
        )
    newest = skipped[0]
    if newest.kind is Unusable.UNTRUSTED:
        return f"{newest.path.name} cannot be trusted: {newest.reason}"
    count = "its only checkpoint is" if len(skipped) == 1 else f"all its {len(skipped)} checkpoints are"
    return (
        f"{count} damaged. Of the newest, {newest.path.name}, {newest.reason} (in {short_path(newest.path.parent)}). "
        "Start it anew with quorate train, or put back a copy of the folder if you have one."
    )


def _why_gone(run: RunFolder, recorded: JobSpec, step: int) -> str:
    copies = [place for place in recorded.checkpoint.to if place != OWN_PLACE]
    commands = ["quorate resume " + shlex.quote(f"{place.rstrip('/')}/{run.name}") for place in copies]
    copied = f", or resume from a copy: {' or '.join(commands)}" if commands else ""
    return (
        f"its events tell of a checkpoint at step {step}, and {short_path(run.checkpoints)} has none any more. Put the "
        f"folder back if you have it{copied}. Otherwise start it anew with quorate train."
    )


def _last_saved(run: RunFolder) -> int | None:
    """The step of the newest checkpoint that the run has told of."""
    saved = (event.step for event in EventTail(run.events_file).read_new() if isinstance(event, CheckpointSaved))
    return max((step for step in saved if step is not None), default=None)
