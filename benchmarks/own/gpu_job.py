"""Jobs on a GPU, started as a user starts them, in a folder of runs that outlasts the benchmark.

What the compiler makes is kept there, too: a job whose kernels are there begins in seconds, and otherwise in a minute.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import quorate
from benchmarks.own.watched_run import WatchedRun, await_sight
from quorate.observe.events import StepCompleted

PATIENCE = 240.0
"""Seconds until a job has come somewhere: its kernels may have to be compiled first."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
MOST_WORDS = 300
"""Of how a job that fails begins to say why, and as many of how it ends."""
_TRIAL = re.compile(r"compiling was tried in ([\d.]+) s: (\d+) of (\d+) graphs came from the cache")


class GpuRun(WatchedRun):
    """One run of an example. `keep` is where runs and compiled kernels lie; the run itself goes when it is over."""

    def __init__(self, order: Mapping[str, Any], job: dict[str, Any], keep: Path | None = None) -> None:
        runs = (Path(order["keep"]) if keep is None else keep) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        named = {**job, "name": f"{job['name']}-{uuid.uuid4().hex[:6]}", "log_level": "info"}
        super().__init__(order["folder"], named, runs)
        self._errors = self.job_file.with_name("errors.txt")

    @contextlib.contextmanager
    def started(self, command: list[str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """The process that trains it; it is told to end, and waited for, at the end of the block."""
        with self._errors.open("wb") as errors:
            process = subprocess.Popen(
                command or self.command(), stdout=subprocess.DEVNULL, stderr=errors, env=self.environment()
            )
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            yield process
        except SystemExit as error:
            # What waits for the job knows only that it has ended.
            raise SystemExit(f"{error}: {self.last_words()}") from None
        finally:
            process.terminate()
            process.wait()

    def complete(self, command: list[str] | None = None) -> None:
        """Train it to its end; the script ends with it if that goes wrong."""
        with self.started(command) as process:
            self.await_end(process)

    def await_end(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait() != 0:
            raise SystemExit(f"the job has ended with code {process.returncode}")

    def resume(self, workers: int) -> list[str]:
        """The command that goes on with it."""
        how = ["--runs", str(self.runs), "--workers", str(workers), "--quiet"]
        return [sys.executable, "-m", "quorate", "resume", self.name, *how]

    def await_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        def is_there() -> bool:
            events = self.events()
            return any(isinstance(event, StepCompleted) and (event.step or 0) >= step for event in events)

        await_sight(f"step {step} is complete", is_there, process, PATIENCE)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def last_words(self) -> str:
        """What the command has said of its end."""
        words = " ".join(self._errors.read_text(errors="replace").split())
        return words if len(words) <= 2 * MOST_WORDS else f"{words[:MOST_WORDS]} … {words[-MOST_WORDS:]}"

    def compiling(self) -> dict[str, float]:
        """How long it took, and how many graphs did not have to be made: nothing where nothing was compiled."""
        logs = "".join(file.read_text() for file in sorted(self.folder.glob("logs/worker-*.jsonl")))
        if (found := _TRIAL.search(logs)) is None:
            return {}
        seconds, kept, graphs = map(float, found.groups())
        return {"compile_s": seconds, "graphs_kept": kept, "graphs": graphs}

    def remove(self) -> None:
        """Its checkpoints take gigabytes."""
        shutil.rmtree(self.folder)

    def environment(self) -> dict[str, str]:
        """What its commands live in."""
        # Whoever runs this without installing Quorate has it on the path.
        path = [str(Path(quorate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        # Without caches of whoever measures: a job keeps its kernels beside its runs, and so none in an empty folder.
        others = {name: value for name, value in os.environ.items() if name not in CACHES}
        return others | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
