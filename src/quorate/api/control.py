"""Asking a running job for something, from another process of its owner."""

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

from quorate.checkpoint.listing import CheckpointInfo, look_at
from quorate.coordinator.client import SupervisorClient
from quorate.core.errors import JobError, LinkError, RequestError, RunError
from quorate.core.failure import Failure
from quorate.core.processes import has_open
from quorate.observe.events import CheckpointFailed, CheckpointSaved, GenerationFormed
from quorate.observe.jsonl import EventTail, end_of_events
from quorate.storage.fencing import Holder
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import (
    asked_of,
    failed_submission,
    forget_submission,
    submission_of,
    those_that_wait,
    waits_to_begin,
)
from quorate.wire.proto import coordinator_pb2 as pb

PATIENCE = 10.0
SAVE_PATIENCE = 300.0
STOP_PATIENCE = 300.0
_STOP_CALL = 5.0
_SIGNAL_AFTER = 2.0
"""Seconds after which a job whose coordinator does not listen is told by a signal to its launcher."""
_RAY_AFTER = 30.0
"""The same for one that Ray has started: Ray gives it no time to save, and a coordinator that died may be back soon."""
_ASK_EVERY = 3.0
_LOOK_EVERY = 0.05


def resize(run: RunFolder, workers: int | None = None, servers: int | None = None) -> RunFolder:
    """Have a running job go on with another number of workers or servers, from its next step boundary on."""
    try:
        with _coordinator_of(run, PATIENCE) as client:
            client.resize(workers, servers)
    except LinkError as error:
        raise _cannot_be_asked(run, error) from None
    return run


def save(run: RunFolder, patience: float = SAVE_PATIENCE) -> CheckpointInfo:
    """Have a running job save a checkpoint at its next step boundary; returns when it is whole, on the disk.

    It is of no earlier step than the job was at when this was called.
    """
    over, due = time.monotonic() + patience, 0.0
    told = EventTail(run.events_file)
    told.offset = end_of_events(run.events_file)
    # One that is sent again is done once; whoever was asked may die, and then another is.
    request, reached = secrets.token_hex(8), None
    while time.monotonic() < over:
        answer: int | None = 0
        if time.monotonic() >= due:
            answer = _ask_to_save(run, request, over - time.monotonic(), is_first=reached is None)
            reached, due = answer if reached is None else reached, time.monotonic() + _ASK_EVERY
        for event in told:
            if isinstance(event, CheckpointSaved) and (event.step or 0) >= (reached or 0):
                if isinstance(found := look_at(run.checkpoints / Path(event.path).name), CheckpointInfo):
                    return found
            elif isinstance(event, GenerationFormed | CheckpointFailed):
                request = secrets.token_hex(8)
        if answer is None:  # and its last checkpoint, with which it has ended, would have been as good
            raise RunError(
                f"run {run.name} has ended, and no checkpoint was saved after it was asked for. See what it has with "
                f"`quorate checkpoints ls {run.name}`"
            )
        time.sleep(_LOOK_EVERY)
    raise RunError(
        f"run {run.name} has saved no checkpoint in {patience:g} s. A step may take longer than that, or the save "
        "fails: `quorate show` says which. Wait longer with --timeout"
    )


def _ask_to_save(run: RunFolder, request: str, patience: float, *, is_first: bool) -> int | None:
    """The step that the job has reached; None where it has ended since it was asked first."""
    try:
        with _coordinator_of(run, min(PATIENCE, max(1.0, patience))) as client:
            return client.save(request)
    except LinkError as error:
        if is_first:
            raise _cannot_be_asked(run, error) from None
        # A coordinator that has died is started again, for as long as there is a launcher.
        return None if run.holder() is None else 0
    except RequestError:
        if is_first:
            raise
        return None


def stop(run: RunFolder, *, now: bool = False, patience: float = STOP_PATIENCE) -> RunFolder:
    """End a running job: it completes its step, saves, and is interrupted; returns when it has ended.

    With `now` nothing more is saved. Raises RunError if it is not running, and JobError if it does not end in time.
    """
    if waiting := those_that_wait([run]):
        from quorate.engines.ray.jobs import ask_about_submitted

        ask_about_submitted(waiting)
    if waits_to_begin(run):
        return _stop_before_begin(run)
    why = failed_submission(run)
    if why and asked_of(run).exists():
        forget_submission(run)  # one that was to be resumed is as it was
        return run
    launcher = run.holder()
    if launcher is None:
        ending = "failed" if why else (run.whole_result() or {}).get("status", "lost")
        raise RunError(f"run {run.name} is not running ({ending}), so there is nothing to stop. {why}".rstrip())
    begun, over = time.monotonic(), time.monotonic() + patience
    otherwise_after = _SIGNAL_AFTER if now or submission_of(run) is None else _RAY_AFTER
    is_asked = False
    while run.holder() is not None:
        if not is_asked:
            is_asked = ask_to_end(run, now) or (
                time.monotonic() > begun + otherwise_after and (_told_by_ray(run) or _signal(run, now))
            )
        if time.monotonic() >= over:
            raise _does_not_end(run, launcher, now, patience)
        time.sleep(_LOOK_EVERY)
    return run


def ask_to_end(run: RunFolder, now: bool = False) -> bool:
    """Have the coordinator end the job; whether there is one that was told."""
    try:
        with _coordinator_of(run, _STOP_CALL) as client:
            if now:
                message = "stopped at once, by quorate stop --now; any checkpoint so far is kept."
                client.report_failure(Failure("Interrupted", message, exit_code=130))
            else:
                client.stop("interrupted")
    except (RunError, LinkError):
        return False
    return True


def _stop_before_begin(run: RunFolder) -> RunFolder:
    """A detached run whose launcher Ray has not started: it never will. One that was at the last moment is told to
    end, and has the last word on how. A run that was to be resumed is as it was."""
    _told_by_ray(run)
    if asked_of(run).exists():
        forget_submission(run)
        return run
    run.write_result({"run": run.name, "folder": str(run.path), "status": "interrupted", "steps": 0})
    return run


def _told_by_ray(run: RunFolder) -> bool:
    """Whether the launcher is a job of Ray's, which is told to end it: it may be on any machine."""
    submission = submission_of(run)
    if submission is not None:
        from quorate.engines.ray.jobs import stop_job

        stop_job(submission)
    return submission is not None


def _signal(run: RunFolder, now: bool) -> bool:
    """Tell the launcher itself: no coordinator listens while a job begins, or waits for its copies."""
    launcher = run.holder()
    if launcher is None or launcher.pid is None:
        return launcher is None
    try:
        if not has_open(launcher.pid, run.lock_file):
            return False  # on another machine, or in another container, this number is somebody else's
        os.kill(launcher.pid, signal.SIGINT)
        if now:
            os.kill(launcher.pid, signal.SIGTERM)  # another one: two of a kind may arrive as one
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended, which the next look sees
    except PermissionError:
        raise RunError(f"run {run.name} belongs to somebody else: only its owner may stop it.") from None
    return True


def _does_not_end(run: RunFolder, launcher: Holder, now: bool, patience: float) -> JobError:
    number = f" {launcher.pid}" if launcher.pid is not None else ""
    more = (
        f"Its launcher (process{number}) hangs, or was stopped: `kill -CONT{number}` lets it continue, "
        f"`kill -KILL{number}` ends it with every process of the job; any checkpoint so far is kept."
        if now
        else "It still completes a step, or saves: `quorate show` says which. Wait longer with --timeout, "
        f"or end it without a save: quorate stop {run.name} --now"
    )
    return JobError(f"run {run.name} was asked to end, and has not in {patience:g} s. {more}")


def status(run: RunFolder, patience: float = PATIENCE) -> pb.StatusReply | None:
    """Who is at work on a running job, and at what; None where nobody answers."""
    try:
        with _coordinator_of(run, patience) as client:
            return client.status()
    except (LinkError, RunError):
        return None


def _cannot_be_asked(run: RunFolder, error: LinkError) -> RunError:
    return RunError(f"run {run.name} cannot be asked: {error.message}. `quorate doctor` looks into it.")


def _coordinator_of(run: RunFolder, patience: float) -> "contextlib.closing[SupervisorClient]":
    try:
        door = run.read_door()
    except FileNotFoundError:
        if waits_to_begin(run):
            raise RunError(
                f"run {run.name} was submitted, and has not begun: wait for it with `quorate logs -f {run.name}`."
            ) from None
        raise RunError(
            f"run {run.name} is not running, so it cannot be asked. Look at it with `quorate show {run.name}`; "
            f"`quorate resume {run.name} --workers N` continues with as many workers as you like."
        ) from None
    except PermissionError:
        raise RunError(f"run {run.name} belongs to somebody else: only its owner may ask it for something.") from None
    except (OSError, ValueError) as error:
        raise RunError(f"where the coordinator of run {run.name} is cannot be read: {error!r}.") from None
    return contextlib.closing(SupervisorClient(door.address, door.token, patience, authority=door.authority))
