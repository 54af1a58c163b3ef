"""Telling somebody of a job's end, or of a lost worker: ``python -m quorate.tracking.notify LOG``.

Each message is brought by a small process of its own, which outlives the launcher where it has to: the end of a job
waits for nobody. It tries again, less and less often, for some minutes, and then gives up; its log says how that went.
"""

import http.client
import json
import logging
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quorate.core.generation import name_of
from quorate.core.log_records import Place, RecordHandler
from quorate.core.masking import mask_all, register_secrets, shown_webhook, url_secrets
from quorate.observe.event import Event
from quorate.observe.events import EvaluationDone, RunFailed, RunFinished, StepCompleted, WorkerLost
from quorate.observe.notices import EARLY_STOP
from quorate.spec.tracking import NotifySpec
from quorate.storage.log_file import LogFile
from quorate.storage.run_folder import RunFolder, finite
from quorate.task.run_mode import PAUSED

log = logging.getLogger(__name__)

FAILED, FINISHED, LOST = "failed", "finished", "lost"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
PATIENCE = 600.0
"""Seconds after which nobody tries any more."""
ANSWER_WITHIN = 10.0
COMMAND_WITHIN = 60.0
MOST = 16
"""Messages that may be on their way at a time; of a lost worker nobody is told while there are so many."""

_TRIED_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True)
class Message:
    """What somebody is told, as JSON. `event` is failed, finished or lost; `status` is that of the run."""

    run: str
    folder: str
    job: str
    event: str
    status: str
    message: str
    steps: int
    metrics: dict[str, float | None]
    time: float


class Notifier:
    """The sink: makes messages of the events that somebody wants to hear of, and sends each on its way."""

    def __init__(
        self, run: RunFolder, job: str, spec: NotifySpec, send: "Callable[[Message], None] | None" = None
    ) -> None:
        self._run = run
        self._job = job
        self._spec = spec
        self._send = send or self._start
        self._steps = 0
        self._metrics: dict[str, float | None] = {}
        self._has_ended = False
        self._under_way: list[subprocess.Popen[bytes]] = []

    def handle(self, event: Event) -> None:
        match event:
            case StepCompleted():
                self._steps = event.step or self._steps
            case EvaluationDone():
                self._metrics = dict(event.metrics or {})
            case WorkerLost():
                text = event.message or f"{name_of(event.worker)} is lost"
                self._tell(LOST, "running", text, event.time)
            case RunFailed() if not self._has_ended:
                self._has_ended = True
                failure, status = event.failure, event.failure.stopped
                self._tell(FAILED if status is None else FINISHED, status or FAILED, failure.message, event.time)
            case RunFinished() if not self._has_ended:
                self._has_ended = True
                self._tell_end(dict(event.result or {}), event.time)

    def close(self) -> None:
        """What is on its way arrives without us."""

    def _tell_end(self, result: dict[str, Any], moment: float) -> None:
        self._steps = result.get("steps", self._steps)
        self._metrics = result.get("final_metrics") or self._metrics
        ending = str(result.get("ending", "complete"))
        status = {EARLY_STOP: "complete", PAUSED: "interrupted"}.get(ending, ending)
        how = "" if status == ending else f" ({ending})"
        self._tell(FINISHED, status, f"{self._run.name} is {status}{how} after {self._steps:,} steps", moment)

    def _tell(self, what: str, status: str, text: str, moment: float) -> None:
        if what in self._spec.on:
            folder = str(self._run.path.absolute())
            about = (self._run.name, folder, self._job, what, status, text, self._steps, self._metrics, moment)
            self._send(Message(*about))

    def _start(self, message: Message) -> None:
        # An address that does not answer, and a job that loses workers all the time, would fill the machine.
        self._under_way = [child for child in self._under_way if child.poll() is None]
        if message.event == LOST and len(self._under_way) >= MOST:
            log.warning("%d notifications are still being sent, so this one is dropped: %s", MOST, message.message)
            return
        told = finite(mask_all(asdict(message)))
        order = {"message": told, "command": self._spec.command, "webhook": self._spec.webhook}
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "quorate.tracking.notify", str(self._run.logs / "notify.jsonl")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C, or the end of the terminal, is not for it
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as pipe:
            # By the pipe: a command line can be read by every user of the machine, and an address may be a secret.
            pipe.write(json.dumps(order).encode())
        self._under_way.append(child)
        # It ends when it likes, and is not left a zombie in a launcher that lives for long, such as a notebook.
        threading.Thread(target=child.wait, name="notification", daemon=True).start()


def pauses() -> Iterator[float]:
    """Seconds to wait after the first attempt, the second, and so on."""
    pause, total = FIRST_PAUSE, 0.0
    while total + pause <= PATIENCE:
        yield pause
        total += pause
        pause = min(2 * pause, LONGEST_PAUSE)


class GiveUp(Exception):  # noqa: N818 (a verdict, not a mistake)
    """To try again is of no use."""


def deliver(
    what: str, attempt: Callable[[], None], wait: Callable[[float], None] = time.sleep, now: Any = time.monotonic
) -> bool:
    """Try until it succeeds, or nobody can hope for it any more; whether it has."""
    began = now()
    waits = pauses()
    while True:
        try:
            attempt()
        except GiveUp as error:
            log.error("%s: %s; not tried again", what, error)
            return False
        except (OSError, subprocess.SubprocessError, http.client.HTTPException) as error:
            pause = next(waits, None)
            if pause is None or now() - began + pause > PATIENCE:
                log.error("%s: %s; given up", what, _reason(error))
                return False
            log.warning("%s: %s; tried again in %g s", what, _reason(error), pause)
            wait(pause)
        else:
            log.info("%s: delivered", what)
            return True


def post(url: str, body: bytes, timeout: float = ANSWER_WITHIN) -> None:
    """Send a body of JSON. Raises OSError where it may be tried again, and GiveUp where not."""
    headers = {"Content-Type": "application/json", "User-Agent": "quorate"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500 and error.code not in _TRIED_AGAIN:
                raise GiveUp(f"the answer is {error.code} {error.reason}") from None
            raise OSError(f"the answer is {error.code} {error.reason}") from None


def run_command(command: str, body: bytes, timeout: float = COMMAND_WITHIN) -> None:
    """Run a command in the shell, with the message on its standard input."""
    subprocess.run(command, shell=True, input=body, timeout=timeout, check=True, capture_output=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.decode(errors="replace").strip()[-500:]
        return f"it ended with code {error.returncode}" + (f": {said}" if said else "")
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s"
    return str(getattr(error, "reason", "") or error) or type(error).__name__


def main() -> None:
    """Bring one message, which is told by standard input, to whom it is for."""
    order = json.loads(sys.stdin.buffer.read())
    message, command, webhook = order["message"], order["command"], order["webhook"]
    register_secrets(url_secrets(webhook or ""))
    place = Place("notification", message["run"])
    handler = RecordHandler(place, LogFile(Path(sys.argv[1]), {"process": place.process}).append)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    body = json.dumps(message).encode()
    ways: list[tuple[str, Callable[[], None]]] = []
    if webhook:
        ways.append((f"{message['event']} to {shown_webhook(webhook)}", lambda: post(webhook, body)))
    if command:
        ways.append((f"{message['event']} by notify.command", lambda: run_command(command, body)))
    # Side by side: an address that does not answer holds up no command.
    threads = [threading.Thread(target=deliver, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
