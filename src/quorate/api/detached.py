"""`quorate train --detach`: a run whose launcher is a job of Ray's, and goes on when whoever submitted it is gone.

Its folder is in the storage that all hosts share. The job is read from there, and the code comes by Ray's runtime
environment: neither Ray's list of jobs nor a command line has more of it than names.
"""

import contextlib
import secrets
import shlex
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quorate.api.engines import node_code, refuse_missing_engine
from quorate.api.job import job_text
from quorate.api.ray_jobs import FOLDER, RUN, jobs_at
from quorate.api.result import Result
from quorate.api.session import Watch, is_private, run_on_engine, start_in
from quorate.api.tasks import TaskLocation
from quorate.core.errors import RequestError
from quorate.engines.node_code import NodeCode, below
from quorate.spec.engine import RaySpec
from quorate.spec.job import TaskReference
from quorate.spec.load import load_recorded
from quorate.spec.resolved import ResolvedJob
from quorate.storage.run_folder import RunFolder
from quorate.storage.submission import Submission, submission_of


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
        file = TaskReference.parse(resolved.spec.task).file
        inside = None if file is None or code.root is None else below(file, code.root)
        # Runs of several storages may have one name.
        submission = Submission(f"{run.name}-{secrets.token_hex(4)}", engine.address, str(inside or ""))
        submission.write(run)
        _send(client, run, submission, code)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    # So that verbs in this folder find it without asking Ray.
    with contextlib.suppress(OSError):
        runs.mkdir(parents=True, exist_ok=True)
        if runs.resolve() != storage.resolve():
            (runs / run.name).symlink_to(run.path)
    return run, submission


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
            "--set engine.storage=/mnt/shared. The run is kept there, for whoever looks at it from elsewhere."
        )
    if not Path(engine.storage).is_dir():
        raise RequestError(
            f"engine.storage: there is no folder {engine.storage} on this machine, which --detach needs."
        )
    return engine


def _send(client: Any, run: RunFolder, submission: Submission, code: NodeCode) -> None:
    from quorate.engines.ray_cluster import packed

    with tempfile.TemporaryDirectory(prefix="quorate-code-") as scratch:
        runtime_env = code.runtime_env(packed(code, Path(scratch)))
        try:
            client.submit_job(
                entrypoint=f"exec python -m quorate.api.detached_launcher {shlex.quote(str(run.path))}",
                submission_id=submission.id,
                runtime_env=runtime_env,
                metadata={RUN: run.name, FOLDER: str(run.path)},
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RequestError(f"Ray has not taken the job: {error}") from None


def launch(folder: Path, watch: Watch) -> Result:
    """On the cluster, in the copy of the task's folder: train the run that was submitted."""
    run = RunFolder(folder)
    submission = submission_of(run)
    resolved = load_recorded(run.job_file, {}, [])
    engine = resolved.spec.engine
    if submission is None or not isinstance(engine, RaySpec):
        raise RequestError(f"{folder} is no run that was submitted to Ray.")
    reference, here = TaskReference.parse(resolved.spec.task), Path.cwd()
    if submission.file:
        reference = replace(reference, file=here / submission.file)
    spec = resolved.spec.model_copy(update={"engine": engine.model_copy(update={"address": "auto"})})
    # What the nodes are given was said with the submission, and holds for all that this process starts.
    runner = partial(run_on_engine, code=NodeCode(root=here, is_sent=True))
    return start_in(run, replace(resolved, spec=spec), TaskLocation(str(reference)), watch, runner)
