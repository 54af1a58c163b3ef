"""A job that is started as a user starts it, and watched from outside: by its events and its log."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from quorate.core.generation import server_id
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, StepCompleted
from quorate.observe.jsonl import EventTail

Found = TypeVar("Found")

PATIENCE = 90.0
GLANCE = 0.02

_BORN = re.compile(r"(worker|server) (\d+) is process (\d+)")


class WatchedRun:
    """One run, in a folder of its own: what an earlier round has left there would be taken for this one's."""

    def __init__(self, folder: str, job: dict[str, Any], runs: Path | None = None) -> None:
        aside = Path(tempfile.mkdtemp(prefix=f"{job['name']}-", dir=folder))
        # Runs of one folder have different names, so that each is told from the others.
        self.runs = aside if runs is None else runs
        self._job = job
        self.job_file = aside / "job.yaml"

    def command(self) -> list[str]:
        """Quorate train."""
        self.job_file.write_text(json.dumps({**self._job, "runs": str(self.runs)}))  # JSON is YAML too
        return [sys.executable, "-m", "quorate", "train", str(self.job_file), "--quiet"]

    @property
    def name(self) -> str:
        """What commands call it, once it has begun."""
        return self.folder.name

    @property
    def folder(self) -> Path:
        """Where it lies, once it has begun."""
        return next(file.parent for file in self._files("events.jsonl"))

    def _files(self, name: str) -> Iterator[Path]:
        return self.runs.glob(f"{self._job['name']}-*/{name}")

    def events(self) -> list[Event]:
        """All that it has told so far, in the order in which it happened."""
        events = [event for file in self._files("events.jsonl") for event in EventTail(file)]
        return sorted(events, key=lambda event: event.time)

    def members(self) -> list[int]:
        """The workers of the newest generation."""
        formed = [event for event in self.events() if isinstance(event, GenerationFormed)]
        return [member.worker for member in formed[-1].members or ()] if formed else []

    def is_steady(self, workers: int, steps: int, since: float = 0.0, servers: int = 0) -> bool:
        """Whether its newest generation was formed since then, and has all members and so many steps behind it."""
        events = self.events()
        formed = next((event for event in reversed(events) if isinstance(event, GenerationFormed)), None)
        if formed is None or len(formed.workers) != workers or formed.time < since:
            return False
        if len(formed.servers or ()) != servers:
            return False
        completed = [event for event in events if isinstance(event, StepCompleted) and event.time > formed.time]
        return len(completed) >= steps

    def pids(self) -> dict[int, int]:
        """The newest process of each worker and server, by its id."""
        logs = "".join(file.read_text() for file in self._files("logs/fork_server.jsonl"))
        born = [(kind, int(number), int(pid)) for kind, number, pid in _BORN.findall(logs)]
        return {server_id(number) if kind == "server" else number: pid for kind, number, pid in born}

    def coordinator(self) -> int | None:
        """The process that has coordinated last."""
        lines = [line for file in self._files("logs/coordinator.jsonl") for line in file.read_text().splitlines()]
        return json.loads(lines[-1])["pid"] if lines else None

    def step_times(self) -> list[float]:
        """When each step was completed."""
        return [event.time for event in self.events() if isinstance(event, StepCompleted)]


def await_sight(
    what: str, look: Callable[[], Found | None], process: subprocess.Popen[bytes], patience: float = PATIENCE
) -> Found:
    """What is seen as soon as there is something to see; it ends the script if the command ends, or after too long."""
    over = time.monotonic() + patience
    while not (found := look()):
        if process.poll() is not None:
            raise SystemExit(f"the command has ended with code {process.returncode} while waiting until {what}")
        if time.monotonic() > over:
            raise SystemExit(f"waited {patience:.0f} s in vain until {what}")
        time.sleep(GLANCE)
    return found
