"""`quorate.train` and `quorate.resume`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quorate.api import session
from quorate.api.interruption import pass_on_signal, passing_on_signals
from quorate.api.job import Job, overrides_from
from quorate.api.result import Result
from quorate.api.show import NotebookStage, watch_here
from quorate.core.errors import QuorateError, RequestError
from quorate.core.given import given
from quorate.storage.run_search import runs_folder


def train(job: Job, progress: bool = True) -> Result:
    """Train a job here and return how it ended; a failed job raises `JobFailed`, a mistake `RequestError`.

    Progress is shown on standard error or, in a notebook, under the cell; `progress=False` shows nothing.

    The first Ctrl-C (in a notebook: interrupting the kernel) waits for the running step and saves a checkpoint, the
    second ends the job at once; either raises KeyboardInterrupt when all workers have ended. SIGTERM does the same and
    ends the script with SystemExit. Where the program has a signal handler of its own, that is called instead, and if
    it returns, so does `train`: with a result whose `status` is interrupted or terminated. In a thread that is not the
    main one `train` hears no signals.
    """
    _refuse_what_is_no_job(job)
    result = _shown(lambda watch: session.start(job.resolved, watch), progress)
    return replace(result, task_type=job.task_type)


def _refuse_what_is_no_job(job: object) -> None:
    if isinstance(job, Job):
        return
    remedy = "quorate.train(quorate.Job(task=..., batch_size=..., epochs=...))"
    if isinstance(job, str | os.PathLike):
        remedy = f'quorate.train(quorate.Job.from_file("{os.fspath(job)}"))'
    elif isinstance(job, type):
        remedy = f"quorate.train(quorate.Job(task={job.__name__}, batch_size=..., epochs=...))"
    raise RequestError(f"quorate.train takes a quorate.Job and was given {given(job)}. Write {remedy}.")


def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs: str | Path | None = None,
    branch: bool = False,
    task: Any = None,
    trust_source: bool = False,
    progress: bool = True,
) -> Result:
    """Go on from the newest whole checkpoint of a run: a name, a unique prefix of one, a path, or ``"last"``.

    The address of a copy of a run, such as ``s3://bucket/prefix/digits-0001``, will do as well: it is fetched first.
    `overrides` (dotted keys, such as ``{"workers": 3}``) may change how it runs, and train it longer; with `branch` a
    new run begins from the checkpoint, and they may change what it means. It ends as `train` does.
    `task` (a class, ``"file.py:Class"`` or ``"package.module:Class"``) says where the task is now, if it was moved.
    `trust_source`: run the task's source that lies beside a copy of a run, also where no key vouches for it.
    """
    layer = overrides_from("quorate.resume", overrides, task)
    resume_run = partial(session.resume, runs_folder(runs), str(run), os.environ, layer)
    return _shown(lambda watch: resume_run(watch=watch, branch=branch, trust_source=trust_source), progress)


def _shown(run: Callable[[session.Watch], Result], progress: bool) -> Result:
    watch = watch_here(progress)
    try:
        with passing_on_signals() as signals:
            result = run(watch)
    except QuorateError as error:
        raise error.with_traceback(None) from None  # the message says it; our own frames say nothing to the caller
    if isinstance(watch, NotebookStage):
        watch.conclude(result)
    pass_on_signal(result.exit_code, _cut_short(result), signals.received)
    return result


def _cut_short(result: Result) -> str:
    if not result.steps:
        return f"run {result.run} was {result.status} before its first step"
    return f'run {result.run} was {result.status} at step {result.steps}; quorate.resume("{result.run}") goes on'
