"""The process that tracks a run by MLflow, TensorBoard and W&B, beside the launcher; and the same work done afterwards.

It reads the run's `events.jsonl` and nothing else, so it neither delays a job nor loses anything: whatever it has not
told by the end of the job, `quorate track` tells later.
"""

import concurrent.futures
import contextlib
import fcntl
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError, RunError
from quorate.core.log_records import STDERR, Place, RecordHandler, encoded
from quorate.core.masking import LineMasker, register_secrets
from quorate.observe.event import Event
from quorate.spec.job import JobSpec, job_secrets
from quorate.spec.load import load_recorded
from quorate.spec.tracking import TrackSpec
from quorate.storage.fencing import FolderInUse, hold
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER, tracking_uri, wish
from quorate.supervisor.signals import listening_to_signals
from quorate.tracking.mlflow_client import MlflowTracker
from quorate.tracking.provenance import record
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
_LOG = "tracker.jsonl"
_PIPE_SIZE = 2**20
_FOR_A_MODEL = ("quorate.api.models", "quorate.worker.assembly", "mlflow.pytorch", "torch.export._trace")


@dataclass(frozen=True)
class Tracked:
    """What a tracker was told, and what is missing: empty if it has everything."""

    tracker: str
    points: int
    last_step: int
    missing: str


def followers_of(run: RunFolder, spec: JobSpec, track: TrackSpec) -> list[Follower]:
    """Who brings each tracker that is switched on what it is to have; none of them the job's secrets."""
    register_secrets(job_secrets(spec))
    trackers: list[Tracker] = []
    if track.mlflow:
        uri = tracking_uri(track, run.path.parent)
        log_model = partial(_log_model, run, spec, uri)
        trackers.append(MlflowTracker(run, spec, uri, track.every, log_model))
    if track.tensorboard:
        trackers.append(TensorBoardTracker(run, track.every))
    if track.wandb is not None:
        trackers.append(WandbTracker(run, spec, track.wandb, track.every))
    if track.trace is not None and track.trace.otlp:
        from quorate.tracking.otlp import OtlpTracker

        trackers.append(OtlpTracker(run, track.trace.otlp))
    return [Follower(run, tracker) for tracker in trackers]


def _log_model(run: RunFolder, spec: JobSpec, uri: str, mlflow_run: Any) -> None:
    """Log the model that a complete run has ended with. What would fail again is told, and not tried again."""
    from quorate.api.models import ModelRegistry, RegistryError

    if spec.checkpoint.sealing is not None:  # in MLflow its weights would lie in plain: that is for a person to do
        told = (
            "the model of run %s is not logged, since its checkpoints are encrypted; `quorate models register` does so"
        )
        log.warning(told, run.name)
        return
    try:
        ended_with = str((run.whole_result() or {}).get("weights_digest"))
        logged = ModelRegistry(uri, is_made=True).log_model(run, ended_with, mlflow_run=mlflow_run)
        log.info("the model is logged as %s", logged.model_id)
    except RegistryError:
        raise
    except (Exception, SystemExit) as error:  # of the task's own code, say
        log.warning("the model is not logged: %s", reason(error), exc_info=True)


def catch_up(run: RunFolder, spec: JobSpec, track: TrackSpec) -> list[Tracked]:
    """Tell trackers all that a run has told so far and, if it has ended, how."""
    with _followers_alone(run, spec, track) as followers:
        ending = _ending(run) if run.holder() is None else None
        return [_conclude(follower, ending, ABSENT, always_begin=True) for follower in followers]


@contextlib.contextmanager
def _followers_alone(run: RunFolder, spec: JobSpec, track: TrackSpec) -> Iterator[list[Follower]]:
    """Those of a run that no other process tracks meanwhile, closed at the end."""
    try:
        (run.path / FOLDER).mkdir(exist_ok=True)
        with hold(run.path / FOLDER / "lock"), contextlib.ExitStack() as made:
            yield [made.enter_context(contextlib.closing(each)) for each in followers_of(run, spec, track)]
    except FolderInUse as in_use:
        raise RunError(f"run {run.name} is being tracked by {in_use} already; wait for it to end") from None
    except OSError as error:
        raise RunError(f"cannot write in {run.path}, where it is kept what was sent: {error.strerror}.") from None


def catch_up_on_ended(runs: Iterable[RunFolder]) -> None:
    """Tell trackers what they have missed of runs that have ended, as where a driver was killed with its trials. What
    is still missing is said, with the command that sends it; a tracker that is away is not waited for at each run."""
    from quorate.api.recorded_run import run_argument  # which the process itself does without

    away: set[str] = set()
    for run in runs:
        try:
            missing = list(_missing_of_ended(run, away))
        except Exception as error:  # whatever it is, the other runs have nothing to do with it
            missing = [error.message if isinstance(error, QuorateError) else reason(error)]
        for sentence in missing:
            log.warning("%s: %s. To send the rest: quorate track %s", run.name, sentence.rstrip("."), run_argument(run))


def _missing_of_ended(run: RunFolder, away: set[str]) -> Iterator[str]:
    """Tell what is untold, but to those who are `away`, which become more; what is missing then."""
    spec = load_recorded(run.job_file, {}, []).spec
    if spec.track is None or run.holder() is not None:
        return
    ending = _ending(run)
    # The task that builds a model may print.
    with contextlib.redirect_stdout(sys.stderr), _followers_alone(run, spec, spec.track) as followers:
        for follower in followers:
            name = follower.tracker.name
            if follower.has_all(ending):
                continue
            if name in away:
                yield f"{name} does not answer, so this run is not sent either"
            elif (told := _conclude(follower, ending, ABSENT, always_begin=True)).missing:
                away |= {name} if not follower.has_begun else set()
                yield told.missing


class TrackerProcess:
    """The launcher's side of it: a sink that does nothing but end the process with the run."""

    def __init__(self, run: RunFolder, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        # A resumed run has its new job in its folder only when the task was accepted.
        job = json.dumps(spec.model_dump(mode="json")).encode() + b"\n"
        (run.path / FOLDER).mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quorate.api.tracker", str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it has a log of its own
            start_new_session=True,  # Ctrl-C is for the launcher alone
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(job)
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
            missing = [f"the process that tracks the run has ended too early; see {self._run.logs / _LOG}"]
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
                    self._say(f"waiting until the run is tracked, {PATIENCE:g} s at most; Ctrl-C ends the wait")


def main() -> None:
    """Track the run in a folder until standard input ends, and then the rest of it."""
    run = RunFolder(Path(sys.argv[1]))
    os.nice(_NICE)
    spec = JobSpec.model_validate(json.loads(_first_line()))
    register_secrets(job_secrets(spec))
    answer = os.dup(1)  # standard output is for this alone; what libraries print goes to the log
    with _logging(run):
        try:
            over = threading.Event()
            threading.Thread(target=_await_end_of_input, args=(over,), daemon=True).start()
            missing = _follow(run, spec, over)
            with contextlib.suppress(OSError):  # the launcher was killed
                os.write(answer, json.dumps(missing).encode())
        except Exception:
            log.exception("the run is not tracked any more")
    os._exit(0)  # threads of libraries may hang


@contextlib.contextmanager
def _logging(run: RunFolder) -> Iterator[None]:
    """Have in the run's log what is logged and printed here, without secrets."""
    place = Place("tracker", run.name)
    file = LogFile(run.logs / _LOG, {"process": place.process})
    logging.basicConfig(level=logging.INFO, handlers=[RecordHandler(place, file.append)])
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):
        # Code in C may print while nothing else of this process can run, and so nobody reads.
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)

    def keep() -> None:
        masker, data = LineMasker(), b"\n"
        while data:
            data = os.read(reading, _PIPE_SIZE)
            about = {"time": round(time.time(), 6), "level": "info", "source": STDERR, **place.fields()}
            lines = masker.feed(data) if data else masker.finish()
            file.append(*(encoded({**about, "message": line.rstrip("\r")}) for line in lines))

    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.close(1)
        os.close(2)
        keeper.join(0.2)  # a process that was left behind may still have them


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
    record(run, spec)
    launcher = os.getppid()

    def serve(follower: Follower) -> Tracked:
        while not over.wait(_EVERY):
            if not loading.is_alive():
                is_wanted = isinstance(follower.tracker, MlflowTracker) and wish(run).exists()
                follower.poll(always_begin=is_wanted)
        if follower.is_needed():
            loading.join()
        holder = run.holder()
        # After a launcher that was killed another may have taken the run up already: then it has not ended.
        is_resumed = holder is not None and holder.pid not in (None, launcher)
        return _conclude(follower, None if is_resumed else _ending(run), ABSENT if is_resumed else PATIENCE)

    with _turn(run, over) as is_ours:
        if not is_ours:
            return ["the run is still being tracked by the process of a launcher that was killed"]
        followers = followers_of(run, spec, spec.track)
        loading = threading.Thread(target=_load, args=(followers,), daemon=True)
        loading.start()
        # Each in a thread of its own: one that hangs holds up no other, nor the end of the process, which exits hard.
        pool = concurrent.futures.ThreadPoolExecutor(len(followers) or 1)
        serving = {follower: pool.submit(serve, follower) for follower in followers}
        over.wait()
        # A little less than it has: what is missing must still be told.
        concurrent.futures.wait(serving.values(), PATIENCE - ABSENT)
        why = "its libraries are still being imported" if loading.is_alive() else ""
        told = [
            done.result() if done.done() else _told(each, is_missing=True, why=why) for each, done in serving.items()
        ]
    return [each.missing for each in told if each.missing]


def _load(followers: Sequence[Follower]) -> None:
    """Import libraries while the job starts: a short job would wait for that at its end.

    Nobody uses them meanwhile: where two threads import a library whose modules import each other, one of them may be
    given half a module, and what a library registers when it is imported may not change while it is gone through.
    """
    for follower in followers:
        with contextlib.suppress(Exception):  # it is told when they are used
            follower.tracker.load()
    if any(isinstance(follower.tracker, MlflowTracker) for follower in followers):
        for name in _FOR_A_MODEL:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


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
    log.info("%s: has all up to step %d; the run is %s", follower.tracker.name, follower.last_step, status)
    return follower.finish(status)


def _told(follower: Follower, *, is_missing: bool, why: str = "") -> Tracked:
    missing = ""
    if is_missing:
        why = why if follower.trouble is None else reason(follower.trouble)
        missing = f"{follower.tracker.name} does not have all of the run: nothing is sure after step "
        missing += f"{follower.last_step} ({why})" if why else str(follower.last_step)
    return Tracked(follower.tracker.name, follower.sent, follower.last_step, missing)


if __name__ == "__main__":
    main()
