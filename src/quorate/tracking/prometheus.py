"""A job's live view for Prometheus, by `track.prometheus`: its metrics, its health, and where they are found.

Prometheus finds the running jobs in `prometheus.json` in the folder of runs, as `file_sd_configs` reads it. Every
launcher that has an endpoint writes itself in, and out again at its end. One that was killed cannot: whoever writes
next leaves out those whose run nobody is at work on. Not at once, since Prometheus tells of a launcher that does not
answer only as long as it is listed.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from quorate.coordinator.client import SupervisorClient
from quorate.core.addresses import join_address
from quorate.core.errors import QuorateError, RequestError
from quorate.core.processes import close_in_children
from quorate.core.regular_file import open_regular, read_regular
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, RunFailed, RunFinished, StepCompleted
from quorate.observe.sinks import Queued
from quorate.spec.job import JobSpec
from quorate.spec.tracking import address_of
from quorate.storage.atomic import write_atomically
from quorate.storage.run_folder import RunFolder
from quorate.tracking.metrics import JobMetrics
from quorate.tracking.provenance import user_name

log = logging.getLogger(__name__)

_ANSWER_WITHIN = 2.0
"""Seconds in which a coordinator that is well answers by far."""

_LAST_SCRAPES = 2
_LINGER = 60.0
"""Seconds that the end of a job waits for its last scrapes, at most."""
_USUAL_INTERVAL = 30.0
"""Seconds that are taken to lie between two scrapes until there were a few."""
_GAPS = 4
_UNTOLD = 0.5
"""Seconds that it waits without a word."""
_LOOK_EVERY = 0.05

_STEPS_OVERDUE = 10
"""So many times as long as the last step may the next one take before no steps are coming."""


class Readiness:
    """Whether a generation is at work: steps are coming."""

    def __init__(self, patience: float, now: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._now = now
        self._is_at_work = False
        self._stepped = 0.0
        self._between = 0.0

    def handle(self, event: Event) -> None:
        match event:
            case StepCompleted():
                now = self._now()
                self._between = now - self._stepped if self._is_at_work else 0.0
                self._is_at_work, self._stepped = True, now
            case GenerationFormed() | RunFinished() | RunFailed():
                self._is_at_work = False

    def is_ready(self) -> bool:
        """Evaluations and saves may lie between two steps, so the next one is waited for a while."""
        overdue = max(self._patience, _STEPS_OVERDUE * self._between)
        return self._is_at_work and self._now() - self._stepped <= overdue


class Scrapes:
    """How often the metrics are read, and so until when somebody can be expected to read them again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._now = now
        self._last = -math.inf
        # The longest of a few counts: a second server, or somebody who looks once, comes soon after another scrape.
        self._gaps = deque([_USUAL_INTERVAL], maxlen=_GAPS)

    def note(self) -> None:
        now = self._now()
        if self.count:
            self._gaps.append(now - self._last)
        self._last, self.count = now, self.count + 1

    def may_come(self) -> bool:
        """False where nobody has ever read them, or whoever did has given up."""
        return self._now() < self._last + 2 * max(self._gaps)


class PrometheusView:
    """A sink that keeps the metrics of a job up to date, and serves them. `notice` says where.

    It is closed when the end of the job was read by whoever has read its metrics before: `say` is given a sentence if
    that takes long, and `is_hurried` tells that nobody wants to wait.
    """

    def __init__(
        self,
        run: RunFolder,
        spec: JobSpec,
        workers: int,
        say: Callable[[str], None] = lambda _: None,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises RequestError if its address is in use."""
        assert spec.track is not None and spec.track.prometheus is not None
        self._run = run
        self._say = say
        self._is_hurried = is_hurried
        self._scrapes = Scrapes()
        self._metrics = JobMetrics(run.name, spec, workers, run_id=run.id, user=user_name())
        self._readiness = Readiness(2 * spec.failure_timeout)
        pages = {"/metrics": self._show_metrics, "/healthz": self._show_health, "/readyz": self._show_readiness}
        self._endpoint = Endpoint(*address_of(spec.track.prometheus), pages)
        self._queue = Queued(self._metrics)
        self._metrics.dropped = lambda: self._queue.dropped
        self.notice = f"metrics for Prometheus at http://{self._endpoint.address}/metrics"
        try:
            announce(run, spec.name, self._endpoint.address)
        except OSError as error:
            # Who scrapes this address by itself needs no file.
            log.warning("%s does not list this job for Prometheus: %s", run.path.parent / FILE, error)

    def handle(self, event: Event) -> None:
        self._readiness.handle(event)
        self._queue.handle(event)

    def close(self) -> None:
        self._queue.close()
        self._linger()
        with contextlib.suppress(OSError):
            withdraw(self._run)
        self._endpoint.close()

    def _linger(self) -> None:
        """Stay until the end was scraped twice: a target that is gone at once has ended unseen."""
        began, enough = time.monotonic(), self._scrapes.count + _LAST_SCRAPES
        is_told = False
        while self._scrapes.count < enough and self._scrapes.may_come() and not self._is_hurried():
            waited = time.monotonic() - began
            if waited > _LINGER:
                return
            if waited > _UNTOLD and not is_told:
                self._say(f"waiting for Prometheus to see the end, {_LINGER:g} s at most; Ctrl-C ends the wait")
                is_told = True
            time.sleep(_LOOK_EVERY)

    def _show_metrics(self, accept: str) -> "Answer":
        self._scrapes.note()
        content, content_type = self._metrics.exposition(accept)
        return Answer(content, content_type=content_type)

    def _show_health(self, _: str) -> "Answer":
        """That this page comes says that the launcher lives."""
        trouble = coordinator_trouble(self._run)
        return Answer(b"ok\n") if trouble is None else Answer(f"{trouble}\n".encode(), 503)

    def _show_readiness(self, _: str) -> "Answer":
        return Answer(b"ok\n") if self._readiness.is_ready() else Answer(b"no steps are coming\n", 503)


def coordinator_trouble(run: RunFolder) -> str | None:
    """Why a run's coordinator cannot be asked; None if it answers."""
    try:
        door = run.read_door()
        client = SupervisorClient(door.address, door.token, _ANSWER_WITHIN, authority=door.authority)
    except (OSError, ValueError):
        return "the coordinator is not up"
    with contextlib.closing(client):
        try:
            client.status()
        except QuorateError as error:
            return f"the coordinator does not answer: {error}"
    return None


FILE = "prometheus.json"
RUN_LABEL = "__meta_quorate_run"
"""Which run an entry is of. Prometheus drops labels of this kind unless it is told to keep them: samples tell their run
themselves."""

_LOCK = ".prometheus.lock"
_PATIENCE = 5.0
_KEPT = 600.0
"""Seconds after its last event for which a run stays listed that nobody is at work on."""
_AGAIN = 0.01


def announce(run: RunFolder, job: str, address: str) -> Path:
    """Write a run in, in place of what it had there before. Raises OSError where the file cannot be written."""
    entry = {"targets": [address], "labels": {"job": job, RUN_LABEL: run.name}}
    return _replace(run, [entry])


def withdraw(run: RunFolder) -> None:
    """Write a run out."""
    _replace(run, [])


def _replace(run: RunFolder, own: list[dict[str, Any]]) -> Path:
    runs = run.path.parent
    file = runs / FILE
    with _locked(runs):
        # Of two at one address the older cannot be alive, and would tell of the younger as if it were its own.
        taken = [entry["targets"] for entry in own]
        others = [
            entry
            for entry in _entries(file)
            if _run_of(entry) != run.name and _is_wanted(runs, entry) and entry.get("targets") not in taken
        ]
        write_atomically(file, json.dumps([*others, *own], indent=2) + "\n")
    return file


@contextlib.contextmanager
def _locked(runs: Path) -> Iterator[None]:
    """One writer at a time: of two that read the same list, the second would undo what the first has added."""
    descriptor = open_regular(runs / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        over = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A writer that was stopped half way must not keep a job from being started.
                if time.monotonic() > over:
                    raise TimeoutError(f"another process has kept {runs / _LOCK} locked for {_PATIENCE:g} s") from None
                time.sleep(_AGAIN)
        yield
    finally:
        # Not only closed: a child that was forked meanwhile has a copy.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _entries(file: Path) -> list[dict[str, Any]]:
    """What is written there. What a person has broken is written anew."""
    try:
        entries = json.loads(read_regular(file))
    except (FileNotFoundError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _run_of(entry: dict[str, Any]) -> str:
    labels = entry.get("labels")
    return str(labels.get(RUN_LABEL, "")) if isinstance(labels, dict) else ""


def _is_wanted(runs: Path, entry: dict[str, Any]) -> bool:
    """Whether a launcher is at work on the entry's run, or was until a while ago. Of what was written by others nothing
    is known: it stays."""
    name = _run_of(entry)
    if not name:
        return True
    if Path(name).name != name:
        return False
    run = RunFolder(runs / name)
    try:
        return run.holder() is not None or time.time() - run.events_file.stat().st_mtime < _KEPT
    except FileNotFoundError:
        return False
    except QuorateError:  # whoever may not look at it cannot tell
        return True


# --- the HTTP server in the launcher: a few pages, nothing but GET

HANG_UP_AFTER = 5.0
"""Seconds for which one that has connected may say nothing."""

_POLLED_EVERY = 0.2


@dataclass(frozen=True)
class Answer:
    """What a page says."""

    content: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[str], Answer]
"""Gives the answer for an Accept header. One that raises is an error 500, and disturbs nobody else."""


class Endpoint:
    """Serves pages by their paths, from its making until it is closed."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """Raises RequestError if the address cannot be had: before anything is trained."""
        try:
            self._server = _Server(host, port, pages)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(
                f"track.prometheus: nothing can listen on {join_address(host, port)} ({reason}). Choose another port, "
                "or 0 for any free one."
            ) from None
        close_in_children(self._server.socket)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLLED_EVERY,), name="endpoint", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it can be reached: also from other machines, where it listens for them."""
        host, port = str(self._server.server_address[0]), int(self._server.server_address[1])
        return join_address(_own_address(self._server.address_family) if host in ("0.0.0.0", "::") else host, port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(HANG_UP_AFTER)


def _own_address(family: int) -> str:
    """The address of this machine from which it would speak to others; its name where it knows no way to them."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as nobody:
        # An address for documentation, and nothing is sent: only the way there is looked up.
        nobody.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
        return str(nobody.getsockname()[0])
    return socket.gethostname()


class _Server(ThreadingHTTPServer):
    """With a thread for each request: one that is slow to ask holds up neither others nor the end of the job."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Without asking for the name of the host, as HTTPServer does: nobody needs it, and it may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Somebody has hung up, or says nothing: nobody has to know."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = HANG_UP_AFTER
    server_version = "quorate"
    sys_version = ""

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            pages = ", ".join(self.server.pages)
            answer = Answer(f"there is no such page; there are {pages}\n".encode(), 404)
        else:
            try:
                answer = page(self.headers.get("Accept", ""))
            except Exception as error:
                answer = Answer(f"{error!r}\n".encode(), 500)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Not to the terminal, where a progress bar is."""
