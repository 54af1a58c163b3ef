"""A job that is started as a user starts it, and watched from outside: by its events and its log."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, StepCompleted
from quorate.observe.jsonl import EventTail

Found = TypeVar("Found")

PATIENCE = 90.0
GLANCE = 0.02

_BORN = re.compile(r"worker (\d+) is process (\d+)")


class WatchedRun:
    """One run, in a folder of its own: what an earlier round has left there would be taken for this one's."""

    def __init__(self, folder: str, job: dict[str, Any]) -> None:
        self.runs = Path(tempfile.mkdtemp(prefix=f"{job['name']}-", dir=folder))
        self._job = job

    def command(self) -> list[str]:
        """Quorate train."""
        file = self.runs / "job.yaml"
        file.write_text(json.dumps({**self._job, "runs": str(self.runs)}))  # JSON is YAML too
        return [sys.executable, "-m", "quorate", "train", str(file), "--quiet"]

    @property
    def name(self) -> str:
        """What commands call it, once it has begun."""
        return next(file.parent.name for file in self.runs.glob("*/events.jsonl"))

    def events(self) -> list[Event]:
        """All that it has told so far, in the order in which it happened."""
        events = [event for file in self.runs.glob("*/events.jsonl") for event in EventTail(file)]
        return sorted(events, key=lambda event: event.time)

    def members(self) -> list[int]:
        """The workers of the newest generation."""
        formed = [event for event in self.events() if isinstance(event, GenerationFormed)]
        return [member.worker for member in formed[-1].members or ()] if formed else []

    def is_steady(self, workers: int, steps: int, since: float = 0.0) -> bool:
        """Whether its newest generation was formed since then, and has so many workers and steps behind it."""
        events = self.events()
        formed = next((event for event in reversed(events) if isinstance(event, GenerationFormed)), None)
        if formed is None or len(formed.workers) != workers or formed.time < since:
            return False
        completed = [event for event in events if isinstance(event, StepCompleted) and event.time > formed.time]
        return len(completed) >= steps

    def pids(self) -> dict[int, int]:
        """The newest process of each worker."""
        logs = "".join(file.read_text() for file in self.runs.glob("*/logs/fork_server.jsonl"))
        return {int(worker): int(pid) for worker, pid in _BORN.findall(logs)}

    def step_times(self) -> list[float]:
        """When each step was completed."""
        return [event.time for event in self.events() if isinstance(event, StepCompleted)]


def await_sight(what: str, look: Callable[[], Found | None], process: subprocess.Popen[bytes]) -> Found:
    """What is seen as soon as there is something to see; it ends the script if the command ends, or after too long."""
    over = time.monotonic() + PATIENCE
    while not (found := look()):
        if process.poll() is not None:
            raise SystemExit(f"the command has ended with code {process.returncode} while waiting until {what}")
        if time.monotonic() > over:
            raise SystemExit(f"waited {PATIENCE:.0f} s in vain until {what}")
        time.sleep(GLANCE)
    return found
