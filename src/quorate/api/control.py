"""Asking a running job for something, from another process of its owner."""

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

from quorate.api.ray_jobs import ask_about_submitted, stop_job
from quorate.checkpoint.listing import WRITING, CheckpointInfo, cursor_of, look_at
from quorate.coordinator.client import JobStatus, SupervisorClient
from quorate.core.errors import JobError, LinkError, RequestError, RunError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor
from quorate.core.processes import has_open
from quorate.storage.lock import Holder
from quorate.storage.run_folder import RunFolder
from quorate.storage.submission import asked_of, failed_submission, forget_submission, submission_of, waits_to_begin

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
_STALE_AFTER = 30.0
"""Seconds for which nothing of an attempt changes when whoever wrote it has died: a disk may be that slow."""


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

    It is one that was begun after this was called, so it is of no earlier step than the job was at then.
    """
    return _SaveRequest(run, patience).wait()


def stop(run: RunFolder, *, now: bool = False, patience: float = STOP_PATIENCE) -> RunFolder:
    """End a running job: it completes its step, saves, and is interrupted; returns when it has ended.

    With `now` nothing more is saved. Raises RunError if it is not running, and JobError if it does not end in time.
    """
    ask_about_submitted([run])
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


def status(run: RunFolder, patience: float = PATIENCE) -> JobStatus | None:
    """Who is at work on a running job, and at what; None where nobody answers."""
    try:
        with _coordinator_of(run, patience) as client:
            return client.status()
    except (LinkError, RunError):
        return None


class _SaveRequest:
    """Asks again and again, since a worker that was asked may die: whether it is done, the folder tells."""

    def __init__(self, run: RunFolder, patience: float) -> None:
        self._run = run
        self._patience = patience
        self._over = time.monotonic() + patience
        # Of what is on the way already, the state was taken before. Not all up to a cursor: what a killed part of the
        # run has left, or what is damaged, may be further than the job is now.
        self._before = _entries(run.checkpoints)
        self._changes: dict[Path, tuple[object, float]] = {}
        self._request = ""
        self._reached: int | None = None

    def wait(self) -> CheckpointInfo:
        """The checkpoint, once it is there. Raises RunError when there is no hope."""
        while True:
            try:
                self._ask()
            except RequestError:
                # Its last checkpoint, with which it has ended, is as good.
                found = self._found() if self._reached is not None else None
                if found is None:
                    raise
                return found
            asked = time.monotonic()
            while time.monotonic() < min(asked + _ASK_EVERY, self._over):
                found = self._found()
                if found is not None:
                    return found
                time.sleep(_LOOK_EVERY)
            if time.monotonic() >= self._over:
                raise RunError(
                    f"run {self._run.name} has saved no checkpoint in {self._patience:g} s. A step may take longer "
                    "than that, or the save fails: `quorate show` says which. Wait longer with --timeout"
                )

    def _ask(self) -> None:
        # While somebody writes, the same request is sent again: they have begun with it, and do it once.
        if not self._request or not self._is_being_written():
            self._request = secrets.token_hex(8)
        try:
            with _coordinator_of(self._run, min(PATIENCE, max(1.0, self._over - time.monotonic()))) as client:
                reached = client.save(self._request)
        except LinkError as error:
            # A coordinator that has died is started again, for as long as there is a launcher.
            if self._reached is None or self._run.holder() is None:
                raise self._ended_or(_cannot_be_asked(self._run, error)) from None
        except RequestError as error:
            raise self._ended_or(error) from None
        else:
            self._reached = reached if self._reached is None else self._reached

    def _ended_or(self, error: RequestError) -> RequestError:
        if self._reached is None:
            return error
        return RunError(
            f"run {self._run.name} has ended, and no checkpoint was saved after it was asked for. See what it has with "
            f"`quorate checkpoints ls {self._run.name}`"
        )

    def _found(self) -> CheckpointInfo | None:
        for (cursor, _), path in self._new_entries():
            if not path.name.startswith(WRITING) and cursor.step >= (self._reached or 0):
                found = look_at(path)
                if isinstance(found, CheckpointInfo):
                    return found
        return None

    def _is_being_written(self) -> bool:
        """Whether something is on the way that goes on: of one whose writer has died, nothing changes any more."""
        now = time.monotonic()
        on_the_way = [path for _, path in self._new_entries() if path.name.startswith(WRITING)]
        for path in on_the_way:
            content = _content(path)
            if path not in self._changes or content != self._changes[path][0]:
                self._changes[path] = (content, now)
        return any(now - self._changes[path][1] < _STALE_AFTER for path in on_the_way)

    def _new_entries(self) -> list[tuple[tuple[Cursor, int], Path]]:
        return [each for each in _entries(self._run.checkpoints).items() if each[0] not in self._before]


def _entries(folder: Path) -> dict[tuple[Cursor, int], Path]:
    """What is saved in a folder and what is on the way, the earliest first, by cursor and number of the folder, which
    stays when the one becomes the other."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            is_on_the_way = path.name.startswith(WRITING)
            cursor = cursor_of(path.name.removeprefix(WRITING).rpartition("-")[0] if is_on_the_way else path.name)
            with contextlib.suppress(FileNotFoundError):
                if cursor:
                    found[cursor, path.stat().st_ino] = path
    return dict(sorted(found.items()))


def _content(folder: Path) -> object:
    """What changes for as long as somebody writes in a folder."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                found.add((path.name, state.st_size, state.st_mtime_ns))
    return found


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
