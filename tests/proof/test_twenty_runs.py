"""A random step of twenty runs, of other tasks, under faults, resumed, on the ring and on servers."""

import random
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bits import bit_tasks
from bits.test_bits import CASES
from proof.proven_runs import TASKS, checkpoints, copied, trained, trainer
from quorate.api import session
from quorate.api.prints import NoDisplay
from quorate.api.warm import WarmRunner
from quorate.checkpoint.store import CheckpointFolder
from quorate.proof.again import recreate, state_digest
from quorate.spec.override import Override
from quorate.storage.run_folder import RunFolder

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("unmeasured"), pytest.mark.timeout(600)]

USUAL: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 40}, "evaluate": None, "steps": None}
SERVERS = {"kind": "parameter-server", "servers": 2}
COSINE = {"kind": "cosine", "warmup": 2}


def of_bits(number: int, **keys: Any) -> tuple[str, Mapping[str, Any]]:
    case = CASES[number]
    length = {} if "epochs" in case.keys else {"steps": 9}
    return f"{Path(bit_tasks.__file__)}:{case.task.__name__}", {**USUAL, **length, **case.keys, **keys}


def of_small(name: str, **keys: Any) -> tuple[str, Mapping[str, Any]]:
    return name, {**USUAL, "steps": 9, **keys}


RUNS = {
    **{CASES[number].name: of_bits(number) for number in (2, 3, 4, 5, 9, 12, 14, 20, 21, 30, 32, 33)},
    "own loop": of_small("own_loop"),
    "killed": of_small("Killed", checkpoint={"every": 2, "keep": 40}),
    "compressed ring": of_bits(1, strategy={"kind": "ring", "compress": {"top_k": 0.25}}),
    "servers": of_bits(1, strategy=SERVERS),
    "servers of Adam": of_bits(2, strategy=SERVERS),
    "compressed servers": of_bits(1, strategy={**SERVERS, "compress": {"top_k": 0.25}}),
    "resumed": of_bits(4, epochs=4),
    "extended": of_bits(2, schedule=COSINE),
}


def history(name: str, runner: WarmRunner, folder: Path) -> RunFolder:
    """Train the run of a name, and do to it what it is called after."""
    shutil.copy(TASKS, folder / "tasks.py")
    task, keys = RUNS[name]
    task = task if ":" in task else f"{folder / 'tasks.py'}:{task}"
    if name not in ("resumed", "extended"):
        return trained(runner, folder, task, **keys)
    resume = partial(session.resume, folder / "runs", "last", {}, watch=lambda _: NoDisplay(), runner=runner)
    if name == "extended":
        run = trained(runner, folder, task, **keys)
        resume([Override("steps", 16, "test")])
        return run
    run = trained(runner, folder, task, until=3, **keys)
    resume([Override("workers", 3, "test")])
    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_random_step_has_the_state_that_was_kept_aside(name: str, runner: WarmRunner, tmp_path: Path) -> None:
    run = history(name, runner, tmp_path)
    aside, chance = checkpoints(run), random.Random(name)
    step = chance.choice(sorted(aside))
    expected = state_digest(CheckpointFolder.at(run.checkpoints), aside[step])
    for workers in (1, 2, 3):
        earlier = {each for each in aside if each < step}
        kept = set(chance.sample(sorted(earlier), min(len(earlier), 2)))
        if name == "extended" and step > 9:
            kept.add(9)  # the rate until then was that of a shorter job
        pruned = copied(run, f"pruned-{workers}", kept | {max(aside)} - {step})
        again = recreate(trainer(runner, pruned), step, tmp_path / f"again-{workers}", workers)
        assert again.difference is None
        assert (again.state_digest, again.workers) == (expected, workers)
