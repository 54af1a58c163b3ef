"""Real small runs to prove something of, trained in this process's warm fork servers."""

import json
import shutil
from pathlib import Path
from typing import Any

import same_bits_tasks
from quorate.api import session
from quorate.api.prints import NoDisplay
from quorate.api.run_part import Runner
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.store import CheckpointFolder
from quorate.proof.again import Trainer
from quorate.spec.load import resolve_mapping
from quorate.storage.run_folder import RunFolder

TASKS = Path(same_bits_tasks.__file__)
JOB: dict[str, Any] = {
    "version": 2,
    "name": "small",
    "lanes": 4,
    "workers": 2,
    "batch_size": 12,
    "steps": 20,
    "seed": 7,
    "evaluate": {"every": 5},
    "checkpoint": {"every": 4, "keep": 20},
    "failure_timeout": 20.0,
}


def trained(runner: Runner, folder: Path, task: str = "Normed", *, until: int | None = None, **keys: Any) -> RunFolder:
    """Train a task of `same_bits_tasks`, or of another file, in a new run."""
    reference = task if ":" in task else f"{TASKS}:{task}"
    given = {**JOB, "task": reference, "runs": str(folder / "runs"), **keys}
    fields = {key: value for key, value in given.items() if value is not None}
    done = session.start(resolve_mapping(fields, "test", {}, []), lambda _: NoDisplay(), runner, until=until)
    return RunFolder(Path(done.folder))


def copied(run: RunFolder, name: str, keeping: set[int] | None = None) -> RunFolder:
    """The run under another name, with the checkpoints of these steps alone, or all."""
    path = run.path.with_name(name)
    shutil.copytree(run.path, path)
    for step, info in checkpoints(copy := RunFolder(path)).items():
        if keeping is not None and step not in keeping:
            shutil.rmtree(info.path)
    return copy


def checkpoints(run: RunFolder) -> dict[int, CheckpointInfo]:
    return {info.cursor.step: info for info in CheckpointFolder.at(run.checkpoints).list()}


def trainer(runner: Runner, run: RunFolder) -> Trainer:
    return Trainer(run, lambda _: NoDisplay(), runner)


def edit_loss(run: RunFolder, step: int) -> float:
    """Change the loss that a run has recorded of a step in its last digits, and return what it was."""
    lines = run.events_file.read_text().splitlines()
    number, event = next(
        (number, event)
        for number, event in enumerate(map(json.loads, lines))
        if event["kind"] == "step" and event["step"] == step
    )
    loss: float = event["loss"]
    lines[number] = json.dumps({**event, "loss": loss * (1 + 1e-9)}, separators=(",", ":"))
    run.events_file.write_text("".join(f"{line}\n" for line in lines))
    return loss
