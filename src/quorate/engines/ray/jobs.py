"""Detached runs as Ray's job list has them: how they are submitted, found from anywhere, asked about and stopped."""

import contextlib
import logging
import os
import shlex
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.core.addresses import split_address
from quorate.core.errors import JobError, RequestError, RunError
from quorate.core.installation import install_of
from quorate.core.masking import mask
from quorate.core.runs_folder import is_run
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import Submission, failed_submission, submission_of, waits_to_begin

RUN, FOLDER = "quorate_run", "quorate_folder"
"""What Ray keeps with a job that is a run of ours: its name, and its folder in the storage."""
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
REACH = 5.0
LOOK_EVERY = 0.2
ASK_EVERY = 2.0
OVER = ("STOPPED", "SUCCEEDED", "FAILED")


def find_detached(reference: str, address: str | None, not_here: RunError) -> RunFolder:
    """The detached run that a person means, by the list of jobs of the cluster at an address, or at RAY_ADDRESS."""
    client = jobs_at(address)
    with _explaining(None):
        jobs = client.list_jobs()
    # The oldest first: of two with one name the newest is meant.
    runs = [job for job in jobs if job.metadata and RUN in job.metadata and FOLDER in job.metadata]
    runs.sort(key=lambda job: job.start_time or 0)
    known = {job.metadata[RUN]: Path(job.metadata[FOLDER]) for job in runs}
    names = [reference] if reference in known else [name for name in known if name.startswith(reference)]
    if not names:
        raise RunError(f"{not_here.message}. No detached run of the Ray cluster has that name either.")
    if len(names) > 1:
        raise RunError(f"{reference!r} may be any of {', '.join(sorted(names))}, which are detached; give more of it")
    folder = known[names[0]]
    if not is_run(folder):
        raise RunError(
            f"run {names[0]} is detached, and its folder is {folder}, which is not on this machine. Mount "
            f"{folder.parent} here, or ask from a machine that has it."
        )
    return RunFolder(folder)


def await_begin(run: RunFolder) -> None:
    """Wait until the launcher of a detached run has taken it up. Raises JobError, with Ray's reason, where it ended
    before."""
    asked = time.monotonic()
    while waits_to_begin(run):
        if time.monotonic() - asked >= ASK_EVERY:
            refuse_ended(run)
            asked = time.monotonic()
        time.sleep(LOOK_EVERY)


def refuse_ended(run: RunFolder) -> None:
    """Raise with Ray's reason for a run that Ray has given up before its launcher took it up."""
    if why := _ask_about(run) or failed_submission(run):
        raise JobError(why)


def ask_about_submitted(runs: Iterable[RunFolder]) -> tuple[str, ...]:
    """Ask Ray about those that wait for it, so that the folder of one that Ray has given up says so from now on. Why
    that could not be asked, once for each cluster: runs are shown without Ray as well."""
    problems: dict[str, str] = {}
    for run in runs:
        submission = submission_of(run)
        if submission is not None and submission.address not in problems:
            try:
                _ask_about(run)
            except RequestError as error:
                problems[submission.address] = error.message
    return tuple(problems.values())


def _ask_about(run: RunFolder) -> str:
    """Why Ray has given up a run that waits for it, which its folder says from now on; empty where it has not."""
    if not waits_to_begin(run) or (submission := submission_of(run)) is None:
        return ""
    client = jobs_at(submission.address)
    with _explaining(submission.address):
        info = client.get_job_info(submission.id)
    if str(info.status.value) not in OVER or not waits_to_begin(run):
        return ""
    why = mask(
        f"run {run.name} has ended before its launcher began ({info.status.value.lower()}): "
        f"{_reason_in(str(info.message or 'no reason given'))} All that was printed: ray job logs {submission.id}"
    )
    with contextlib.suppress(OSError):  # of another's run, which is there for reading only
        replace(submission, failure=why).write(run)
    return why


def _reason_in(message: str) -> str:
    """Ray adds what was printed last. Of that the end says why: a launcher's own error, or the line of an exception."""
    first, *printed = message.strip().splitlines() or [""]
    errors = [number for number, line in enumerate(printed) if line.startswith("error: ")]
    return " ".join(" ".join([first, *printed[errors[-1] if errors else -1 :]]).split())


def submit_launcher(client: Any, run: RunFolder, submission: Submission, runtime_env: dict[str, Any]) -> None:
    """Have Ray start the launcher of a run. Raises RequestError where Ray has not taken it."""
    try:
        client.submit_job(
            entrypoint=f"exec python -m quorate.api.detached {shlex.quote(str(run.path))}",
            submission_id=submission.id,
            runtime_env=runtime_env,
            metadata={RUN: run.name, FOLDER: str(run.path)},
        )
    except BaseException as error:
        if isinstance(error, Exception) and _is_known(client, submission):
            return  # only the answer was lost
        with contextlib.suppress(Exception):  # Ctrl-C, when it may have been taken
            client.stop_job(submission.id)
        if isinstance(error, OSError | RuntimeError | ValueError):
            raise RequestError(f"Ray has not taken the job: {error}") from None
        raise


def _is_known(client: Any, submission: Submission) -> bool:
    try:
        client.get_job_info(submission.id)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


def stop_job(submission: Submission) -> None:
    """Have Ray end the launcher of a run, with SIGTERM and 3 s later for good: too short for a save."""
    client = jobs_at(submission.address)
    with _explaining(submission.address):
        client.stop_job(submission.id)


def jobs_at(address: str | None) -> Any:
    """Ray's client for jobs, of the cluster at an address as job files have it; None and auto: by RAY_ADDRESS."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise RequestError(f"detached runs need the library ray, here as well: {install_of('ray')}") from None
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it tells of each file that it sends
    given = None if address in (None, "auto") else address
    with _explaining(address), _only(given):
        # Ray itself tries for minutes, and says nothing meanwhile.
        if given is not None and "://" not in given:
            socket.create_connection(split_address(given), timeout=REACH).close()
        return JobSubmissionClient(given)


@contextlib.contextmanager
def _only(address: str | None) -> Iterator[None]:
    """For Ray, its variables beat what it is told."""
    kept = {name: os.environ.pop(name) for name in VARIABLES if address is not None and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _explaining(address: str | None) -> Iterator[None]:
    where = "at RAY_ADDRESS, or on this machine," if address in (None, "auto") else f"at {address}"
    try:
        yield
    except (OSError, RuntimeError, ValueError, SystemExit) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(
            f"the jobs of the Ray cluster {where} cannot be asked ({reason}). It needs its dashboard, which has the "
            "job server: pip install 'ray[default]' there, and `ray start --head`."
        ) from None
    except Exception as error:
        if type(error).__name__ != "AuthenticationError":  # Ray's own; it is no error of any usual kind
            raise
        raise RequestError(
            f"the Ray cluster {where} asks for a token, and the one here is missing or wrong. `ray get-auth-token` "
            "prints it on the cluster's head; here, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to it."
        ) from None
