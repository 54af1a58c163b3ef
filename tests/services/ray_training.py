"""`quorate train` as a person types it, on a Ray cluster of the tests."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import await_condition

TASK = Path(__file__).parent / "ray_task.py"
PATIENCE = 600.0
"""Seconds: a busy machine takes minutes until a job has begun."""
STEPS = 30
STRATEGIES = {
    "ring": [],
    "servers": ["--set", "strategy.kind=parameter-server", "--set", "strategy.servers=1"],
}
ON_RAY = ["--set", "engine=ray", "--set", "engine.placement=spread"]


def write_job(folder: Path, lines: str = "", lanes: int = 3, steps: int = STEPS, name: str = "small") -> Path:
    """A small job, with what else it says in `lines`."""
    file = folder / "job.yaml"
    file.write_text(
        f"version: 2\nname: {name}\ntask: {TASK}:Small\nlanes: {lanes}\nbatch_size: 12\nsteps: {steps}\nseed: 5\n"
        f"runs: {folder}/runs\n{lines}\n"
    )
    return file


class Training:
    """`quorate train`, under way."""

    def __init__(self, job: Path, environment: dict[str, str], *options: str) -> None:
        self.job = job
        self.errors = ""
        command = [sys.executable, "-m", "quorate", "train", str(job), "--json", *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def result(self) -> dict[str, Any]:
        out, self.errors = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0, self.errors
        fields: dict[str, Any] = json.loads(out)
        return fields

    def refusal(self) -> str:
        out, errors = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 2, errors
        return out + errors

    def interrupt(self) -> None:
        """As Ctrl-C does; waits until it has ended."""
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=PATIENCE)

    def end(self) -> None:
        """Whatever has become of it, it is gone."""
        self._process.kill()
        self._process.communicate()

    def events(self, kind: str) -> list[dict[str, Any]]:
        # The last line may be half written.
        whole = [file.read_text().rpartition("\n")[0] for file in self.job.parent.glob("runs/*/events.jsonl")]
        found = [json.loads(line) for text in whole for line in text.splitlines()]
        return [event for event in found if event["kind"] == kind]

    def await_event(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]] | None:
            assert self._process.poll() is None, self._process.communicate()[1]
            events = self.events(kind)
            return events if len(events) >= count else None

        return await_condition(f"{count} of {kind}", look, PATIENCE)
