"""Known results: before a job is trained, the runs that are there are looked through for one that was this job.

A run counts only if its identity is equal and its data are proven. The launcher neither imports the task nor reads
data: what the job's identity would be is found out by a process that prepares it, and only if the file of some job and
its params say the same.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from quorate.api import session
from quorate.api.job import job_text
from quorate.api.prints import Watch
from quorate.api.result import Result
from quorate.api.run_part import Runner, run_on_engine
from quorate.api.tasks import TaskLocation
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import QuorateError, RequestError
from quorate.core.failure import JobFailed
from quorate.engines.engine import Prepared
from quorate.history.identity import Identity
from quorate.observe.screen import REUSED
from quorate.spec.job import JobSpec
from quorate.spec.load import load_recorded
from quorate.spec.meaning import LENGTH, meaning_of, params_of
from quorate.spec.resolved import ResolvedJob
from quorate.storage.identity_file import IDENTITY
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import listening_to_signals
from quorate.supervisor.supervisor import Launch

log = logging.getLogger(__name__)

_ALONE = {"workers": 1, "min_workers": 1, "spares": 0, "port": 0, "track": None, "notify": None}


@dataclass(frozen=True)
class Known:
    """A run that was a job: all of it if it `is_complete`, or its first steps, up to its last checkpoint."""

    run: RunFolder
    is_complete: bool
    step: int

    @property
    def fields(self) -> dict[str, Any]:
        """The result of a complete one."""
        return {**(self.run.whole_result() or {}), REUSED: self.run.name}

    def take_over(self, run: RunFolder, resolved: ResolvedJob) -> bool:
        """Have in the folder of a new run what the known one has trained and told, from which it can be resumed. False
        where that is gone, as after a clean-up: then the folder is, too."""
        try:
            self._copy_to(run, resolved)
        except OSError as error:
            log.warning("run %s is known and cannot be read, so its job is trained: %s", self.run.name, error)
            shutil.rmtree(run.path, ignore_errors=True)
            return False
        return True

    def _copy_to(self, run: RunFolder, resolved: ResolvedJob) -> None:
        run.write_job(job_text(resolved), is_private=session.is_private(resolved.spec))
        for name in (run.events_file.name, IDENTITY):
            shutil.copyfile(self.run.path / name, run.path / name)
        shutil.copytree(self.run.checkpoints, run.checkpoints, copy_function=_link, dirs_exist_ok=True)
        if self.is_complete:
            run.write_result({**self.fields, "run": run.name, "folder": str(run.path)})


def start(resolved: ResolvedJob, watch: Watch, runner: Runner = run_on_engine) -> Result:
    """Train a job in a new run folder, unless its result is known or it asks for no known one. A run with its first
    steps is continued in the new folder."""
    session.refuse_in_worker()
    runs = Path(resolved.spec.runs).absolute()
    known = known_run(resolved, runs, runner)
    if known is None:
        return session.start(resolved, watch, runner)
    if known.is_complete:
        return Result.of(known.run, known.fields)
    run = RunFolder.create(runs, resolved.spec.name)
    try:
        if not known.take_over(run, resolved):
            return session.start(resolved, watch, runner)
        result = session.resume(runs, run.name, {}, [], watch=watch, runner=runner)
    except RequestError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    run.write_result(fields := {**result.fields, REUSED: known.run.name})
    return Result.of(run, fields)


def known_run(resolved: ResolvedJob, runs: Path, runner: Runner, *, is_usual: bool = False) -> Known | None:
    """The run that a job need not train again, in a folder of runs and in the searches there; of several that are not
    complete the one with most steps. `is_usual`: the job asks for it unless it says otherwise."""
    spec = resolved.spec
    is_fixed = spec.strategy.fixes_bits and spec.deterministic and not spec.lineage
    if not (is_usual if spec.reuse is None else spec.reuse) or not is_fixed or spec.engine.is_cluster:
        return None
    likely = likely_runs(spec, runs)
    now = _identity_of(resolved, runner) if likely else None
    return None if now is None else best_known(spec, likely, now)


def likely_runs(spec: JobSpec, runs: Path) -> dict[Path, Identity]:
    """The runs that may have been a job, as far as its file and its params say."""
    length = dict.fromkeys(LENGTH)
    wanted, params = meaning_of(spec, 0) | length, params_of(spec.params)
    likely = {}
    for file in sorted([*runs.glob(f"*/{IDENTITY}"), *runs.glob(f"*/trials/*/{IDENTITY}")]):
        identity = Identity.of_run(RunFolder(file.parent))
        if identity is not None and identity.is_proven and identity.facts["job"] | length == wanted:
            theirs = identity.facts["task"]["params"]
            if all(_may_be(value, theirs.get(name)) for name, value in params.items()):
                likely[file.parent] = identity
    return likely


def _may_be(asked: Any, recorded: Any) -> bool:
    """Whether a param of a job may be what a task has made of it; all but numbers and texts their digest tells."""
    is_plain = isinstance(asked, str | int | float) and isinstance(recorded, str | int | float)
    return not is_plain or asked == recorded


class _EnoughError(Exception):
    """A job is prepared, and is not to be trained."""


def _identity_of(resolved: ResolvedJob, runner: Runner) -> Identity | None:
    """What the identity of a run of the job would be."""
    found = None

    def accept(prepared: Prepared) -> NoReturn:
        nonlocal found
        found = Identity.of_record(prepared.identity)
        raise _EnoughError

    place, spec = TaskLocation(resolved.spec.task), resolved.spec.model_copy(update=_ALONE)
    with TemporaryDirectory(prefix="quorate-known-") as scratch, listening_to_signals() as signals:
        run = RunFolder.create(Path(scratch), spec.name)
        launch = Launch(run, spec, 1, resolved.source, search_path=place.search_path, identifies=True)
        with contextlib.suppress(_EnoughError, QuorateError):  # what is wrong with the job its run tells
            runner(launch, lambda _: None, accept, signals)
        if signals.reason is not None:
            raise JobFailed(signals.failure(f"{signals.reason}; no run was begun."))
    return found


def best_known(spec: JobSpec, likely: Mapping[Path, Identity], now: Identity) -> Known | None:
    """Of these runs the one that was the job, or the beginning of it, which would have this identity."""
    begun = []
    for path, identity in sorted(likely.items(), key=lambda each: each[1].digest != now.digest):
        is_equal = identity.digest == now.digest
        if now.is_proven and (is_equal or (identity.any_length and identity.prefix == now.prefix)):
            known = _known(RunFolder(path), spec, is_equal)
            if known is not None and known.is_complete:
                return known
            begun += [known] if known is not None else []
    return max(begun, key=lambda known: known.step, default=None)


def _known(run: RunFolder, spec: JobSpec, is_equal: bool) -> Known | None:
    # What memory has changed on the way is no fact of the job; nor is a run known that somebody is at work on.
    if run.stored is not None or run.holder() is not None or run.micro_batches_file.exists():
        return None
    try:
        recorded, saved = load_recorded(run.job_file, {}, []).spec, CheckpointFolder.at(run.checkpoints).list()
        step, result = saved[-1].cursor.step if saved else 0, run.whole_result() or {}
    except QuorateError:
        return None
    # By its job: a resume to more steps that was refused has changed its identity, and nothing else.
    lengths = [(getattr(recorded, unit), getattr(spec, unit)) for unit in LENGTH]
    is_as_long = all(one == other for one, other in lengths)
    is_whole = is_equal and is_as_long and result.get("status") == "complete" and result.get("steps") == step
    if step and is_whole and _is_sound(run, recorded, saved[-1]):
        return Known(run, True, step)
    is_shorter = is_as_long or any(less and more and less < more for less, more in lengths)
    is_sealed = spec.checkpoint.sealing is not None or any(each.manifest.encryption for each in saved)
    return Known(run, False, step) if step and is_shorter and not is_sealed else None


def _is_sound(run: RunFolder, recorded: JobSpec, last: CheckpointInfo) -> bool:
    """Whether every byte that a result is of can be read."""
    try:
        CheckpointFolder.of_job(run.checkpoints, recorded.checkpoint).verify(last)
    except (QuorateError, OSError) as error:
        log.warning("run %s is known, but is no answer: %s", run.name, error)
        return False
    return True


def _link(source: str, target: str) -> None:
    """A file of a checkpoint is never written again, so that two runs can have it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
