"""`quorate train --detach` and `resume --detach`: a run whose launcher is a job of Ray's, and goes on when whoever
submitted it is gone.

Its folder is in the storage that all hosts share. The job is read from there, and the code comes by Ray's runtime
environment: neither Ray's list of jobs nor a command line has more of it than names.
"""

import contextlib
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quorate.api.job import job_text
from quorate.api.prints import Watch
from quorate.api.recorded_run import recorded_and_asked, refuse_early_stopped, refuse_others_run
from quorate.api.result import Result
from quorate.api.run_part import Setup, refuse_missing_engine, run_on_engine
from quorate.api.session import is_private, resumable, resume_in, start_in
from quorate.api.tasks import TaskLocation, find_task, with_task_at
from quorate.core.errors import JobError, QuorateError, RequestError, RunError
from quorate.core.runs_folder import is_copy
from quorate.engines.ray.jobs import jobs_at, refuse_ended, submit_launcher
from quorate.engines.ray.node_code import NodeCode, below, node_code
from quorate.engines.ray.option import RaySpec
from quorate.spec.job import TaskReference
from quorate.spec.load import load_recorded
from quorate.spec.override import Override, is_asked
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import (
    Submission,
    asked_of,
    forget_asked,
    forget_submission,
    submission_of,
    waits_to_begin,
)

STOP_PATIENCE = 300
"""Seconds that `ray job stop` gives a launcher to complete its step and save, where Ray itself would give 3."""


def submit(resolved: ResolvedJob) -> tuple[RunFolder, Submission]:
    """Make the run of a job, and have Ray start its launcher; returns when Ray has taken it."""
    engine = _detachable(resolved)
    refuse_missing_engine(resolved.spec)
    storage, runs = Path(engine.storage or ""), Path(resolved.spec.runs).absolute()
    text = job_text(resolved)
    client = jobs_at(engine.address)
    code = node_code(resolved.spec, resolved.spec.task, runs, resolved.source)
    run = RunFolder.create(storage, resolved.spec.name, beside=runs)
    try:
        run.write_job(text, is_private=is_private(resolved.spec))
        submission = _send(client, run, engine.address, resolved.spec.task, code)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    # So that verbs in this folder find it without asking Ray.
    with contextlib.suppress(OSError):
        runs.mkdir(parents=True, exist_ok=True)
        if runs.resolve() != storage.resolve():
            (runs / run.name).symlink_to(run.path)
    return run, submission


def submit_resume(
    runs: Path,
    reference: str,
    environment: Mapping[str, str],
    overrides: Sequence[Override],
    *,
    trust_job: bool = False,
) -> tuple[RunFolder, Submission]:
    """Have Ray start a launcher that resumes a run, which is in the storage as a whole. What can be refused here is."""
    if is_copy(reference):
        raise RequestError(f"--detach: {reference} is a copy of a run. Fetch it by resuming it here, without --detach.")
    found = RunFolder.find(runs, reference)
    # As it was found: in the folder of runs there is a link to one in the storage.
    refuse_others_run(runs, reference, found, environment, overrides, trust_job=trust_job)
    run = RunFolder(found.path.resolve())
    recorded, resolved = recorded_and_asked(run, environment, overrides)
    engine = _detachable(resolved)
    if run.path.parent != Path(engine.storage or "").resolve():
        raise RequestError(
            f"--detach: run {run.name} is in {run.path.parent}, and not in engine.storage ({engine.storage}), where "
            "all nodes find it. Move its folder there, or resume it here, without --detach."
        )
    client = jobs_at(engine.address)
    _refuse_submitted(run)
    refuse_early_stopped(run, recorded.spec, resolved.spec, branch=False)
    with run.lock():
        resumable(run, recorded, resolved)
    asked = resolved.spec.task if is_asked("task", environment, overrides) else None
    place = find_task(run, recorded.spec.task, asked)
    resolved = with_task_at(resolved, place)
    write_atomically(asked_of(run), dump_job(resolved), 0o600 if is_private(resolved.spec) else 0o644)
    try:
        code = node_code(resolved.spec, place.reference, runs.absolute(), resolved.source)
        return run, _send(client, run, engine.address, place.reference, code)
    except BaseException:
        forget_asked(run)
        raise


def _refuse_submitted(run: RunFolder) -> None:
    """A launcher may be on its way already; one that Ray has given up is not."""
    if waits_to_begin(run):
        with contextlib.suppress(JobError):
            refuse_ended(run)
            raise RunError(f"run {run.name} was submitted already; wait for it, or: quorate stop {run.name}")


def _detachable(resolved: ResolvedJob) -> RaySpec:
    engine = resolved.spec.engine
    if not isinstance(engine, RaySpec):
        raise RequestError(
            "--detach submits a job to a Ray cluster, and this one says engine: local. Add --set engine=ray, or leave "
            "--detach out; on this machine, nohup or tmux keep a job going."
        )
    if engine.address == "local":
        raise RequestError("engine.address: a cluster of the job's own (local) ends with it; --detach needs another.")
    if engine.storage is None:
        raise RequestError(
            "--detach needs engine.storage: a folder that this machine and all nodes have mounted, such as "
            "--set engine.storage=/mnt/shared. The run is stored there, so that other machines can see it."
        )
    if engine.object_store is not None:
        raise RequestError(
            "--detach stores the whole run in engine.storage, so that other machines can see it: that has to be a "
            f"folder that this machine and all nodes have mounted, and not a store ({engine.storage})."
        )
    if not Path(engine.storage).is_dir():
        raise RequestError(
            f"engine.storage: there is no folder {engine.storage} on this machine, which --detach needs."
        )
    return engine


def _send(client: Any, run: RunFolder, address: str, task: str, code: NodeCode) -> Submission:
    from quorate.engines.ray.connection import packed

    file = TaskReference.parse(task).file
    inside = None if file is None or code.root is None else below(file, code.root)
    # Runs of several storages may have one name.
    submission = Submission(f"{run.name}-{secrets.token_hex(4)}", address, str(inside or ""))
    code = replace(code, variables={"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_PATIENCE), **code.variables})
    with tempfile.TemporaryDirectory(prefix="quorate-code-") as scratch:
        runtime_env = code.runtime_env(packed(code, Path(scratch)))
        before = submission_of(run)
        submission.write(run)  # first: the launcher reads it
        try:
            submit_launcher(client, run, submission, runtime_env)
        except BaseException:
            forget_submission(run) if before is None else before.write(run)
            raise
    return submission


def launch(folder: Path, watch: Watch) -> Result:
    """On the cluster, in the copy of the task's folder: train, or resume, the run that was submitted."""
    run = RunFolder(folder)
    submission = submission_of(run)
    is_resumed = asked_of(run).exists()
    resolved = load_recorded(asked_of(run) if is_resumed else run.job_file, {}, [])
    engine = resolved.spec.engine
    if submission is None or not isinstance(engine, RaySpec):
        raise RequestError(f"{folder} is no run that was submitted to Ray.")
    reference, here = TaskReference.parse(resolved.spec.task), Path.cwd()
    if submission.file:
        reference = replace(reference, file=here / submission.file)
    spec = resolved.spec.model_copy(update={"engine": engine.model_copy(update={"address": "auto"})})
    # What the nodes are given was said with the submission, and holds for all that this process starts.
    runner = partial(run_on_engine, code=NodeCode(root=here, is_sent=True))
    setup, here_resolved = Setup(TaskLocation(str(reference)), watch, runner), replace(resolved, spec=spec)
    if is_resumed:
        return resume_in(run, resolved, here_resolved, setup)
    return start_in(run, here_resolved, setup)


def main() -> int:
    """Train the run in the folder that is named, as Ray has it done; the exit code."""
    from quorate.api.train import show_on_stderr

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return launch(Path(sys.argv[1]), show_on_stderr).exit_code
    except QuorateError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
