"""The process that tracks a run by MLflow, TensorBoard and W&B, beside the launcher; and the same work done afterwards.

It reads the run's `events.jsonl` and nothing else, so it neither delays a job nor loses anything: whatever it has not
told by the end of the job, `quorate track` tells later.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from quorate.core.errors import RunError
from quorate.observe.event import Event
from quorate.spec.job import JobSpec
from quorate.spec.tracking import TrackSpec
from quorate.storage.lock import FolderInUse, hold
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import listening_to_signals
from quorate.tracking.mlflow_client import tracking_uri
from quorate.tracking.mlflow_tracker import MlflowTracker
from quorate.tracking.provenance import FOLDER, record
from quorate.tracking.tensorboard_tracker import TensorBoardTracker
from quorate.tracking.tracker import Follower, Tracker, reason
from quorate.tracking.wandb_tracker import WandbTracker

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a tracker has after the end of a job to take the rest."""
ABSENT = 5.0
"""The same for one that has not answered at all."""
_EVERY = 1.0
_UNTOLD = 10.0
_NICE = 10


@dataclass(frozen=True)
class Tracked:
    """What a tracker was told, and what is missing: empty if it has everything."""

    tracker: str
    points: int
    last_step: int
    missing: str


def followers_of(run: RunFolder, spec: JobSpec, track: TrackSpec) -> list[Follower]:
    """Who brings each tracker that is switched on what it is to have."""
    made = [Follower(run, tracker, track.every) for tracker in trackers_of(run, spec, track)]
    if track.trace is not None and track.trace.otlp:
        from quorate.tracking.otlp import OtlpTracker

        exporter = OtlpTracker(run, track.trace.otlp)
        made.append(Follower(run, exporter, track.every, sink=exporter.sink))
    return made


def trackers_of(run: RunFolder, spec: JobSpec, track: TrackSpec) -> list[Tracker]:
    """Those that are switched on."""
    made: list[Tracker] = []
    if track.mlflow:
        made.append(MlflowTracker(run, spec, tracking_uri(track, run.path.parent)))
    if track.tensorboard:
        made.append(TensorBoardTracker(run))
    if track.wandb is not None:
        made.append(WandbTracker(run, spec, track.wandb))
    return made


def catch_up(run: RunFolder, spec: JobSpec, track: TrackSpec) -> list[Tracked]:
    """Tell trackers all that a run has told so far and, if it has ended, how."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    try:
        with hold(run.path / FOLDER / "lock"):
            ending = _ending(run) if run.holder() is None else None
            followers = followers_of(run, spec, track)
            return [_conclude(follower, ending, ABSENT, always_begin=True) for follower in followers]
    except FolderInUse as in_use:
        raise RunError(f"run {run.name} is being tracked by {in_use} already; wait for it to end") from None


class TrackerProcess:
    """The launcher's side of it: a sink that does nothing but end the process with the run."""

    def __init__(self, run: RunFolder, spec: JobSpec) -> None:
        self._run = run
        (run.path / FOLDER).mkdir(exist_ok=True)
        with (run.logs / "tracker.log").open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quorate.api.tracker", str(run.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the launcher alone
            )
        assert self._process.stdin is not None
        # A resumed run has its new job in its folder only when the task was accepted.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(spec.model_dump()).encode() + b"\n")
            self._process.stdin.flush()

    def handle(self, event: Event) -> None:
        """It reads the file."""

    def close(self) -> None:
        """Let it tell the rest, unless somebody asks for an end, and say what is missing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._await_end()
        if self._process.poll() is None:
            self._process.kill()
        answer = self._process.stdout.read()
        self._process.wait()
        self._process.stdout.close()
        try:
            missing = [str(sentence) for sentence in json.loads(answer)]
        except (ValueError, TypeError):
            missing = [f"the process that tracks the run has ended too early; see {self._run.logs / 'tracker.log'}"]
        from quorate.api.recorded_run import run_argument  # which the process itself does without

        for sentence in missing:
            log.warning("%s. To send the rest: quorate track %s", sentence, run_argument(self._run))

    def _await_end(self) -> None:
        began, is_told = time.monotonic(), False
        with listening_to_signals() as signals:
            heard = len(signals.received)
            while (waited := time.monotonic() - began) < PATIENCE and len(signals.received) == heard:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)
                    return
                if waited > _UNTOLD and not is_told:
                    is_told = True
                    log.warning("waiting until the run is tracked, %g s at most; Ctrl-C ends the wait", PATIENCE)


def main() -> None:
    """Track the run in a folder until standard input ends, and then the rest of it."""
    run = RunFolder(Path(sys.argv[1]))
    # What libraries print goes to the log; standard output is for the one answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    os.nice(_NICE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    spec = JobSpec.model_validate(json.loads(_first_line()))
    over = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(over,), daemon=True).start()
    record(run, spec)
    missing = _follow(run, spec, over)
    with contextlib.suppress(OSError):  # the launcher was killed
        os.write(answer, json.dumps(missing).encode())
    logging.shutdown()
    os._exit(0)  # threads of libraries may hang


def _first_line() -> bytes:
    """Not through a buffer, which would take what a later reader waits for."""
    line = b""
    while not line.endswith(b"\n") and (piece := os.read(0, 1)):
        line += piece
    return line


def _await_end_of_input(over: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    over.set()
    # Whatever hangs: nobody is left to end this process where the launcher was killed.
    time.sleep(PATIENCE)
    os._exit(1)


def _follow(run: RunFolder, spec: JobSpec, over: threading.Event) -> list[str]:
    assert spec.track is not None

    launcher = os.getppid()

    def serve(follower: Follower) -> Tracked:
        while not over.wait(_EVERY):
            follower.poll()
        holder = run.holder()
        # After a launcher that was killed another may have taken the run up already: then it has not ended.
        is_resumed = holder is not None and holder.pid not in (None, launcher)
        return _conclude(follower, None if is_resumed else _ending(run), ABSENT if is_resumed else PATIENCE)

    with _turn(run, over) as is_ours:
        if not is_ours:
            return ["the run is still being tracked by the process of a launcher that was killed"]
        followers = followers_of(run, spec, spec.track)
        serving = _in_threads(serve, followers)
        over.wait()
        # A little less than it has: what is missing must still be told.
        concurrent.futures.wait(serving.values(), PATIENCE - ABSENT)
        told = [done.result() if done.done() else _told(each, is_missing=True) for each, done in serving.items()]
    return [each.missing for each in told if each.missing]


def _in_threads(work: Callable[[Follower], Tracked], followers: Sequence[Follower]) -> dict[Follower, Future[Tracked]]:
    """Each in a thread of its own: one that hangs holds up no other, nor the end of the process."""

    def fulfil(follower: Follower, future: Future[Tracked]) -> None:
        try:
            future.set_result(work(follower))
        except BaseException as error:
            future.set_exception(error)

    futures = {follower: Future[Tracked]() for follower in followers}
    for follower, future in futures.items():
        threading.Thread(target=fulfil, args=(follower, future), name=follower.tracker.key, daemon=True).start()
    return futures


@contextlib.contextmanager
def _turn(run: RunFolder, over: threading.Event) -> Iterator[bool]:
    """Alone: the process of a launcher that was killed may still be at work, for as long as its patience lasts. False
    if it still is when the patience of this one, too, is half over."""
    with contextlib.ExitStack() as stack:
        ended = None
        while True:
            try:
                stack.enter_context(hold(run.path / FOLDER / "lock"))
                break
            except FolderInUse:
                ended = ended or (time.monotonic() if over.is_set() else None)
                if ended is not None and time.monotonic() - ended > PATIENCE / 2:
                    yield False
                    return
                time.sleep(_EVERY / 2)
        yield True


def _conclude(follower: Follower, status: str | None, patience: float, *, always_begin: bool = False) -> Tracked:
    """Tell it the rest and, if the run has ended, how; until it takes nothing for as long as patience lasts."""
    since, sent = time.monotonic(), follower.sent
    while not _is_done(follower, status, always_begin):
        if follower.sent > sent:
            since, sent = time.monotonic(), follower.sent
        if time.monotonic() - since > (patience if follower.has_begun else ABSENT):
            return _told(follower, is_missing=True)
        time.sleep(_EVERY / 2)
    return _told(follower, is_missing=False)


def _ending(run: RunFolder) -> str:
    """How a run has ended; lost if nobody lived to write that."""
    return str((run.whole_result() or {}).get("status", "lost"))


def _is_done(follower: Follower, status: str | None, always_begin: bool) -> bool:
    if not follower.poll(always_begin=always_begin, patiently=False):
        return False
    if not follower.has_begun or status is None:
        return True
    # The model itself is logged here, once the tracker has everything else.
    return follower.finish(status)


def _told(follower: Follower, *, is_missing: bool) -> Tracked:
    missing = ""
    if is_missing:
        why = "" if follower.trouble is None else f" ({reason(follower.trouble)})"
        missing = f"{follower.tracker.name} does not have all of the run: nothing is sure after step "
        missing += f"{follower.last_step}{why}"
    return Tracked(follower.tracker.name, follower.sent, follower.last_step, missing)


if __name__ == "__main__":
    main()
