"""What a run folder says of its job and its environment, corrected by its checkpoints, which hold both as well.

Also whether a run can be resumed as it is asked to, and from which checkpoint; and what is left of one that did not
complete, and what to type next.
"""

import contextlib
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo, Skipped, Unusable, survey
from quorate.checkpoint.selection import changes_since, saved_job, search_own, select, warned_of, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import CheckpointError, DamagedFileError, RunError
from quorate.core.failure import CHECKPOINT_LOST, FOLDER_LOST, Failure, Remains
from quorate.core.runs_folder import runs_folder
from quorate.engines.engine import SOURCE
from quorate.history.run_record import RunRecord
from quorate.observe.events import CheckpointSaved
from quorate.observe.jsonl import EventTail
from quorate.observe.notices import EARLY_STOP
from quorate.spec.changes import Change, changes, refused_on_resume
from quorate.spec.job import OWN_PLACE, CheckpointSpec, JobSpec
from quorate.spec.load import RECORDED, load_recorded, resolve_mapping
from quorate.spec.override import DEFAULT, Override, environment_overrides, is_asked
from quorate.spec.problems import in_brackets
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.atomic import move_into_place
from quorate.storage.run_folder import RunFolder, is_in_use, refuse_untrusted, why_untrusted
from quorate.storage.task_files import read_source

log = logging.getLogger(__name__)

OTHERS = "checkpoints-of-other-runs"


def recorded_job(run: RunFolder) -> ResolvedJob:
    """The job of a run. Where its job.yaml is gone, a checkpoint holds it too."""
    return recorded_and_asked(run, {}, [])[0]


def recorded_and_asked(
    run: RunFolder, environment: Mapping[str, str], overrides: Sequence[Override]
) -> tuple[ResolvedJob, ResolvedJob]:
    """The job of a run as it is recorded, and with what is asked for now over it.

    Nothing is written, also where the file is gone: whoever reads a run does not hold its lock.
    """
    if run.job_file.exists():
        return load_recorded(run.job_file, {}, []), load_recorded(run.job_file, environment, overrides)
    keys = _saved_keys(run)
    recorded, asked = (resolve_mapping(keys, RECORDED, *layers) for layers in (({}, []), (environment, overrides)))
    return replace(recorded, source=str(run.job_file)), replace(asked, source=str(run.job_file))


def _saved_keys(run: RunFolder) -> dict[str, Any]:
    """The job in the newest checkpoint that can be used. What was fetched is no word of the person who fetched it."""
    if (fetched := run.read_fetched()) is not None:
        raise RunError(
            f"{short_path(run.job_file)} is gone, and run {run.name} (or a checkpoint of it) was fetched from "
            f"{fetched['from']}, where others may have changed the job. Put the file back, or remove the run's folder "
            "and resume from there again."
        )
    saved = CheckpointFolder.at(run.checkpoints).list()
    # A checkpoint of another run may lie among them: this one is called after its job.
    own = [info for info in saved if run.name.startswith(f"{info.manifest.job.get('name')}-")] or list(saved)
    if not own:
        raise RunError(
            f"{short_path(run.job_file)} is gone, and run {run.name} has no checkpoint that has the job. "
            "Put the file back, or start again with quorate train."
        )
    problems = []
    for info in reversed(own):
        job = saved_job(info)
        if job is None:
            problems.append(f"the job in checkpoint {info.path.name} cannot be read by this version of Quorate")
            continue
        try:
            # Under its own key; one that names none, beside others that do, is not taken at its word.
            CheckpointFolder.of_job(run.checkpoints, job.checkpoint).verify(info)
        except CheckpointError as error:
            problems.append(error.message.rstrip("."))
            continue
        log.warning("%s is gone: the job in checkpoint %s is used", short_path(run.job_file), info.path.name)
        return job.model_dump()
    raise RunError(f"{short_path(run.job_file)} is gone, and {problems[0]}. Put the file back.")


def recorded_environment(run: RunFolder, checkpoint: CheckpointInfo | None) -> dict[str, Any]:
    """What a run's bits depend on besides its job: by its file or, where that is gone or damaged, by a checkpoint."""
    saved = {} if checkpoint is None else checkpoint.manifest.environment
    try:
        return run.read_environment() or saved
    except DamagedFileError as error:
        if checkpoint is None:
            raise
        log.warning("%s (here: %s)", error, checkpoint.path.name)
        return saved


def restore_environment(run: RunFolder, recorded: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write again what a run's bits depend on, where its file is gone or damaged."""
    with contextlib.suppress(DamagedFileError):
        if run.read_environment() is not None:
            return
    run.write_environment({name: recorded[name] for name in names if name in recorded})


def chosen_checkpoint(
    run: RunFolder, recorded: JobSpec, which: str | int, rules: CheckpointSpec
) -> tuple[CheckpointFolder, CheckpointInfo]:
    """The checkpoint of a run that is meant (`select`), and the folder to load it from; one that is looked at as one of
    the run and is not is warned of."""
    folder = CheckpointFolder.of_job(run.checkpoints, rules)
    foreign = partial(why_foreign, spec=recorded)
    info = select(run.name, folder, which, lambda: RunRecord.read(run).best, foreign)
    if why := foreign(info):
        log.warning("checkpoint %s is not of this run: %s", info.path.name, why)
    return folder, info


def set_foreign_aside(run: RunFolder, spec: JobSpec) -> None:
    """Move checkpoints of other jobs out of the folder: whoever replaces a lost worker would go on from the newest."""
    for info in CheckpointFolder.at(run.checkpoints).list():
        if why_foreign(info, spec):
            aside = run.path / OTHERS
            try:
                aside.mkdir(exist_ok=True)
                move_into_place(info.path, aside / info.path.name)
            except OSError as error:
                raise RunError(
                    f"checkpoint {info.path.name} is not of run {run.name} and cannot be moved to {aside}: "
                    f"{error.strerror or error}. Move it away."
                ) from error
            log.warning("checkpoint %s was moved to %s", info.path.name, short_path(aside))


def refuse_other_meaning(run: RunFolder, recorded: ResolvedJob, resolved: ResolvedJob) -> None:
    """Refuse what would make the run produce something else, with both values and who asks for it."""
    if recorded.removed:
        gone = " ".join(f"{key}: {instead}" for key, instead in recorded.removed.items())
        raise RunError(
            f"run {run.name} was started with keys that this version of Quorate no longer has. {gone} Then start a new "
            "run from its checkpoint with --branch."
        )
    changed = [change for change in refused_on_resume(recorded.spec, resolved.spec) if not is_moved_task(change)]
    if not changed:
        return
    if {change.key for change in changed} <= {"epochs", "steps"}:
        raise RunError(f"run {run.name} {_why_not_this_long(run_argument(run), recorded.spec, resolved)}")
    raise RunError(
        f"run {run.name} was started with other values for keys that affect results: {listed(changed, resolved)}. "
        "Resume without the change, or start a new run from its checkpoint with --branch."
    )


def is_moved_task(change: Change) -> bool:
    """A task may lie elsewhere, and under another name. Its code is compared by itself."""
    names = [str(reference).rpartition(":")[2] for reference in (change.before, change.after)]
    return change.key == "task" and names[0] == names[1]


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
    if is_longer and asked.schedule is not None and asked.schedule.depends_on_length:
        log.warning(
            "the rate of a %s schedule depends on how long the job is, so from here on it differs from that of a job "
            "that was this long from the start",
            asked.schedule.kind,
        )


def newest_checkpoint(run: RunFolder, recorded: JobSpec, rules: CheckpointSpec) -> CheckpointInfo:
    """The newest whole checkpoint of the run, under the job's key if it has one; what was skipped is warned of."""
    search = search_own(keyed_folder(run, rules).search, lambda info: why_foreign(info, recorded))
    newest = search.newest
    for left in search.skipped:
        if left.kind is Unusable.NEWER:
            # Going back would undo the steps in between, which nobody has asked for.
            away = "" if newest is None else f", or move {short_path(left.path)} away to resume from {newest.path.name}"
            raise RunError(
                f"checkpoint {left.path.name} of run {run.name} {left.reason}. Resume with that version{away}."
            )
    if newest is None:
        refuse_lost_checkpoints(run, recorded, "resume from")
        raise RunError(f"run {run.name} has nothing to resume from: {_why_nothing(search.skipped)}")
    return warned_of(newest, search.skipped)


def _why_nothing(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return (
            "it ended before its first checkpoint. Start again with quorate train; "
            "`checkpoint: {every: N}` saves every N steps."
        )
    newest = skipped[0]
    if newest.kind is Unusable.UNTRUSTED:
        return f"{newest.path.name} cannot be trusted: {newest.reason}"
    count = "its only checkpoint is" if len(skipped) == 1 else f"all its {len(skipped)} checkpoints are"
    return (
        f"{count} damaged. Of the newest, {newest.path.name}, {newest.reason} (in {short_path(newest.path.parent)}). "
        "Start again with quorate train, or put back a copy of the folder if you have one."
    )


def refuse_lost_checkpoints(run: RunFolder, recorded: JobSpec, purpose: str) -> None:
    """Refuse a run whose checkpoints are all gone although it has saved some: they were removed, or not copied."""
    if survey(run.checkpoints):
        return
    told = [event.step for event in EventTail(run.events_file).read_new() if isinstance(event, CheckpointSaved)]
    steps = [step for step in told if step is not None]
    if not steps:
        return
    copies = [place for place in recorded.checkpoint.to if place != OWN_PLACE]
    commands = ["quorate resume " + shlex.quote(f"{place.rstrip('/')}/{run.name}") for place in copies]
    copied = f", or resume from a copy: {' or '.join(commands)}" if commands else ""
    raise RunError(
        f"run {run.name} has nothing to {purpose}: its events record a checkpoint at step {max(steps)}, and "
        f"{short_path(run.checkpoints)} has none any longer. Put the folder back if you have it{copied}. Otherwise "
        "start again with quorate train."
    )


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


def remains_of(run: RunFolder, spec: JobSpec, failure: Failure | None = None) -> Remains:
    """What a run has left that failed, or was stopped."""
    try:
        saved = CheckpointFolder.at(run.checkpoints).list()
    except CheckpointError:
        saved = ()  # trouble with the disk must not hide what has ended the job
    changes = failure is not None and failure.is_repeatable
    if not saved:
        again = "fix it and train again" if changes else "train again"
        return Remains(run.name, str(run.path), short_path(run.logs), None, _without_checkpoint(spec, failure, again))
    command, step = f"quorate resume {run_argument(run)}", saved[-1].cursor.step
    # The command comes first, where no terminal breaks it.
    advice = f"{command}  (resumes from step {step})"
    if changes:
        command += " --branch"
        advice = f"{command}  (once it is fixed: resumes from step {step} in a new run)"
    return Remains(run.name, str(run.path), short_path(run.logs), command, advice)


def _without_checkpoint(spec: JobSpec, failure: Failure | None, again: str) -> str:
    if failure is not None and failure.kind == CHECKPOINT_LOST:
        return f"put a checkpoint back into the run and resume it, or {again}"
    if failure is not None and failure.kind == FOLDER_LOST:
        return f"where it was renamed, give it its name again and resume it, or {again}"
    if failure is None or not failure.step:
        return f"{again}; nothing was trained yet, so there is nothing to resume"
    rules = spec.checkpoint
    said = f"every: {rules.every}" if rules.every is not None else f"minutes: {rules.minutes_between or 0:g}"
    return f"{again}; no checkpoint was saved yet, so there is nothing to resume (checkpoint.{said})"


def run_argument(run: RunFolder) -> str:
    """What a person types for the run, here: its name in the usual folder of runs, its path elsewhere."""
    return run.name if run.path.parent == runs_folder().absolute() else shlex.quote(short_path(run.path))


def short_path(path: Path) -> str:
    """A path as it can be typed here: relative, if it is below the working folder."""
    try:
        here = Path(os.path.realpath("."))
    except FileNotFoundError:  # Ray removes the copy of a project while its launcher is there
        return str(path)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


KEY = "checkpoint.encrypt"
"""Where a job says which key its checkpoints have."""


def keyed_folder(run: RunFolder, rules: CheckpointSpec) -> CheckpointFolder:
    """The checkpoints of a run with the key that a person or a job names."""
    try:
        return CheckpointFolder.of_job(run.checkpoints, rules)
    except CheckpointError as error:
        raise RunError(f"{KEY}: {error.message}") from None


def refuse_others_run(
    runs: Path,
    reference: str,
    run: RunFolder,
    environment: Mapping[str, str] = MappingProxyType({}),
    overrides: Sequence[Override] = (),
    *,
    trust_job: bool = False,
) -> None:
    """Refuse a run that is named by its path and that others may have written. With a key that the person names, its
    job is the one in the newest checkpoint that was written with it."""
    if is_in_use(runs, reference, run.path):
        return
    if names_key([*environment_overrides(environment)[0], *overrides]):
        asked = load_recorded(run.job_file, environment, overrides, without_key)
        if asked.spec.checkpoint.sealing is not None:
            _take_sealed(run, asked, environment, overrides)
            return
    if not trust_job:
        refuse_untrusted(why_untrusted(runs, reference, run.path), run.path, "what its job names is not used")


def _take_sealed(
    run: RunFolder, asked: ResolvedJob, environment: Mapping[str, str], overrides: Sequence[Override]
) -> None:
    """Give a run the job and the environment of its newest checkpoint that was written with the key asked for."""
    with run.lock():
        newest = keyed_folder(run, asked.spec.checkpoint).search(lambda _: "").newest
        saved = None if newest is None else saved_job(newest)
        if newest is None or saved is None:
            raise RunError(f"no checkpoint in {run.checkpoints} was written with the key, so the job may be anybody's.")
        kept, told = read_source(run.path), newest.manifest.environment.get(SOURCE)
        if kept is not None and kept.source.digest != told and not is_asked("task", environment, overrides):
            raise RunError(
                f"the source in {kept.folder} is not the code that encrypted checkpoint {newest.path.name} records "
                f"(digest {kept.source.digest}, and {told}). Name the task by --task FILE:Class."
            )
        keys = saved.model_dump()
        now = resolve_mapping(without_key(keys), RECORDED, environment, overrides)
        if changed := changes(asked.spec, now.spec):
            log.warning(
                "%s is not what the key authenticates; the job of checkpoint %s is used: %s",
                *(run.job_file, newest.path.name, "; ".join(map(str, changed))),
            )
            run.write_job(dump_job(resolve_mapping(keys, RECORDED, {}, [])), is_private=True)
        run.write_environment(newest.manifest.environment)


def without_key(job: dict[str, Any]) -> dict[str, Any]:
    """The keys of a job, which need not be valid, but for that of its checkpoints."""
    section = job.get("checkpoint")
    given = section if isinstance(section, Mapping) else {}
    return {**job, "checkpoint": {key: value for key, value in given.items() if key != "encrypt"}}


def names_key(said: Sequence[Override]) -> bool:
    """Whether a person names the key of checkpoints."""
    return any(f"{each.key}.".startswith(f"{KEY}.") for each in said)
