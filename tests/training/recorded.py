"""A gang whose events are kept: what a user would see of a run."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gang
from made_events import fields_of
from quorate.checkpoint.store import CheckpointFolder
from quorate.observe.event import Event
from quorate.observe.events import read_event
from quorate.task.task import Task


@dataclass(frozen=True)
class Run:
    """How it ended, and everything that was told on the way."""

    ended: gang.Ended
    events: list[Event]
    folder: Path

    def fields(self, kind: str, name: str) -> dict[int | None, Any]:
        """One field of all events of a kind, by step."""
        return {event.step: fields_of(event).get(name) for event in self.events if event.kind == kind}

    @property
    def metrics(self) -> dict[int | None, dict[str, float]]:
        return self.fields("evaluation", "metrics")

    @property
    def saved_steps(self) -> list[int]:
        return [info.cursor.step for info in CheckpointFolder(self.folder / "checkpoints").list()]

    @property
    def told(self) -> list[tuple[str, int | None, dict[str, Any]]]:
        """The events without what depends on time and place."""
        return [
            (event.kind, event.step, {key: value for key, value in fields_of(event).items() if not _is_passing(key)})
            for event in self.events
            if event.kind != "checkpoint"  # told by a thread of its own, somewhere between the steps
        ]


def run(task: type[Task], folder: Path, workers: int = 1, stop_at: int | None = None, **keys: Any) -> Run:
    """Train; in a folder that was used before, go on from its checkpoint. Without audits: for these one checkpoint more
    is kept, which depends on the number of workers."""
    keys = {"audit": {"every": 0}} | keys
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "events.jsonl"
    events.unlink(missing_ok=True)
    ended = gang.train(task, gang.job(task, **keys), workers, folder, stop_at=stop_at, sabotage=_keeping(events))
    lines = events.read_text().splitlines() if events.exists() else []
    return Run(ended, [read_event(line) for line in lines], folder)


def on_one_and_on_three(task: type[Task], folder: Path, **keys: Any) -> Run:
    """The run on three workers, after checking that one worker gives the same bits and tells the same."""
    one, three = run(task, folder / "one", 1, **keys), run(task, folder / "three", 3, **keys)
    assert three.ended.digest == one.ended.digest
    assert three.ended.ending == one.ended.ending
    assert json.dumps(three.ended.progress) == json.dumps(one.ended.progress)
    assert json.dumps(three.told) == json.dumps(one.told)
    assert three.saved_steps == one.saved_steps
    return three


def _keeping(file: Path) -> Callable[[int, Any], None]:
    def attach(position: int, loop: Any) -> None:
        if 0 not in loop.strategy.hosted:
            return
        publish = loop.publish

        def keep(event: Event) -> None:
            publish(event)
            with file.open("a") as stream:
                stream.write(event.to_json() + "\n")

        loop.publish = keep
        loop.checkpointer.context = replace(loop.checkpointer.context, publish=keep)

    return attach


def _is_passing(key: str) -> bool:
    return key.endswith("_s") or key in ("samples_per_second", "path", "bytes", "seconds")
