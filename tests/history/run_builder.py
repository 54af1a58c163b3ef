"""Run folders made by hand: as the launcher, the coordinator and a worker would have left them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import xxhash

from made_events import make_event
from quorate.checkpoint.listing import checkpoint_name
from quorate.checkpoint.manifest import Manifest, Part
from quorate.core.generation import Cursor, Phase
from quorate.observe.event import Event
from quorate.observe.jsonl import JsonlSink
from quorate.spec.load import resolve_mapping
from quorate.spec.override import Override
from quorate.spec.resolved import dump_job
from quorate.storage.run_folder import RunFolder

CREATED = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
JOB: dict[str, Any] = {"name": "tiny", "task": "/code/task.py:Tiny", "lanes": 4, "batch_size": 8, "steps": 8}
COMPLETE: dict[str, Any] = {
    "status": "complete",
    "ending": "complete",
    "steps": 8,
    "weights_digest": "ab" * 32,
    "samples_per_second": 640.0,
    "final_metrics": {"loss": 0.5},
    "best": {"value": 0.5, "step": 8},
    "wall_seconds": 3.5,
    "recoveries": [],
}
MEMBERS = [
    {"worker": 0, "address": "127.0.0.1:4001", "lanes": [0, 1]},
    {"worker": 1, "address": "127.0.0.1:4002", "lanes": [2, 3]},
]


@dataclass
class Story:
    """Events of a run, one second after another."""

    time: float = CREATED.timestamp()
    events: list[Event] = field(default_factory=list)
    parts: int = 0

    def tell(self, kind: str, step: int | None = None, **fields: Any) -> "Story":
        """One more event, a second later."""
        self.time += 1
        self.events.append(make_event(kind, step, fields, self.time))
        return self

    def begin(self, from_step: int = 0, total_steps: int = 8) -> "Story":
        """A launcher takes the run up."""
        self.parts += 1
        self.tell("generation", generation=f"{self.parts}.1", lanes=4, members=MEMBERS)
        return self.tell("run", from_step=from_step, total_steps=total_steps, steps_per_epoch=4, lanes=4)

    def train(self, first: int, last: int, **fields: Any) -> "Story":
        """Steps, the first and the last included; the loss is 1 over the step."""
        for step in range(first, last + 1):
            usual = {"epoch": 0, "loss": 1 / step, "samples": 8, "samples_per_second": 80.0, "compute_s": 0.05}
            self.tell("step", step, **{**usual, **fields})
        return self

    def lose(self, worker: int, step: int, from_step: int) -> "Story":
        """A worker is lost, and the others go on; 0.25 s later it is back."""
        message = f"worker {worker} (pid 4711 on host x) was killed by SIGKILL at step {step}. Often it is memory."
        self.tell("lost", step, worker=worker, cause="WorkerLost", message=message, phase="compute", detect_s=0.005)
        left = [member for member in MEMBERS if member["worker"] != worker]
        return self.tell("generation", generation=f"{self.parts}.2", lanes=4, members=left, from_step=from_step)

    def come_back(self, from_step: int) -> "Story":
        """Everybody is there again."""
        self.tell("generation", generation=f"{self.parts}.3", lanes=4, members=MEMBERS, from_step=from_step)
        return self.tell("copied", from_step, generation=f"{self.parts}.3", bytes=1000, seconds=0.125)

    def evaluate(self, step: int, **metrics: float) -> "Story":
        """An evaluation."""
        return self.tell("evaluation", step, metrics=metrics, best=False)

    def pause(self, seconds: float) -> "Story":
        """Nobody works on the run."""
        self.time += seconds
        return self


def whole_story() -> Story:
    """The events of a run that nothing happened to."""
    story = Story().begin().train(1, 4).evaluate(4, loss=0.75).train(5, 8).evaluate(8, loss=0.5)
    return story.tell("finished", weights_digest="ab" * 32, result={})


def build_run(
    runs: Path,
    *,
    job: dict[str, Any] | None = None,
    overrides: Sequence[Override] = (),
    story: Story | None = None,
    result: dict[str, Any] | None = None,
    after: float = 0.0,
) -> RunFolder:
    """A run created so many seconds after `CREATED`, with a job, what it told, and how it ended."""
    keys = JOB | (job or {})
    run = RunFolder.create(runs, keys["name"])
    (run.path / "created").write_text((CREATED + timedelta(seconds=after)).isoformat())
    run.write_job(dump_job(resolve_mapping(keys, "job.yaml line 1", {}, overrides)))
    if story is not None:
        sink = JsonlSink(run.events_file)
        for event in story.events:
            sink.handle(event)
        sink.close()
    if result is not None:
        run.write_result({"run": run.name, "folder": str(run.path), **result})
    return run


def complete_run(runs: Path, **options: Any) -> RunFolder:
    """A run that nothing happened to, with the checkpoint of its end."""
    run = build_run(runs, **{"story": whole_story(), "result": COMPLETE, **options})
    run.write_environment({"python": "3.11.7", "torch": "2.13.0", "task source": "code-1:" + "cd" * 32})
    add_checkpoint(run, 8)
    return run


def add_checkpoint(run: RunFolder, step: int, phase: Phase = Phase.EVALUATED) -> Path:
    """A checkpoint with a sound manifest, whose one part holds 300 bytes."""
    content = b"x" * 300
    folder = run.checkpoints / checkpoint_name(Cursor(step, phase))
    folder.mkdir()
    part = Part("state.safetensors", len(content), f"xxh3-128:{xxhash.xxh3_128(content).hexdigest()}")
    (folder / part.file).write_bytes(content)
    manifest = Manifest(
        step=step,
        phase=int(phase),
        created="2026-05-04T12:00:09+00:00",
        parts=(part,),
        skeleton=None,
        weights_digest="ab" * 32,
        job={},
        environment={"torch": "2.13.0", "canary": "ef" * 16, "dataset": "01" * 16},
        metrics={},
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder
