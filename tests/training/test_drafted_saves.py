"""A device that is not the host copies the state itself: a save in mid-training waits for nothing, and is of its step.

The device of these tests makes a copy at the last moment. So what is changed before that was held back is in the copy.
"""

from pathlib import Path
from typing import Any

import numpy
import pytest

import gang
from bits import bit_tasks as tasks
from quorate.checkpoint.store import CheckpointFolder
from quorate.task.progress import Progress
from quorate.task.run_mode import RunMode
from quorate.training.checkpointer import Checkpointer
from quorate.training.loop import Loop
from quorate.training.save import Draft
from replica.away_device import AwayDevice
from training.recorded import Run, run
from training.test_lagging import SCHEDULED, PoisonedAdam, poisoned_steps
from training.test_skipping import skipped

pytestmark = pytest.mark.usefixtures("unmeasured")

KEYS: dict[str, Any] = {"lanes": 4, "evaluate": {"every": 1_000}, "checkpoint": {"every": 7, "keep": 9}}


def with_device(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AwayDevice:
    made = AwayDevice(**options)
    monkeypatch.setattr(gang, "CPU", made)
    return made


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save before a draft is complete by then: a busy machine does not change the test."""
    draft = Checkpointer.draft

    def patiently(checkpointer: Checkpointer, progress: Progress) -> Draft | None:
        running = checkpointer._running()
        assert running is None or running.done.wait(60)
        return draft(checkpointer, progress)

    monkeypatch.setattr(Checkpointer, "draft", patiently)


def states(ran: Run) -> dict[int, str]:
    """All that each checkpoint of a run holds."""
    folder = CheckpointFolder(ran.folder / "checkpoints")
    return {info.cursor.step: repr(folder.load(info).state) for info in folder.list()}


of_two_kinds = pytest.mark.parametrize(
    "task",
    [pytest.param(tasks.Adam, marks=pytest.mark.long), tasks.BatchNormAndDropout],
    ids=lambda task: task.__name__,
)


@of_two_kinds
def test_a_save_in_mid_training_waits_for_nothing_and_takes_no_memory_after_the_first(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = with_device(monkeypatch)
    figures = []
    for steps in (20, 48):
        before = numpy.array((device.waits, device.copies, device.locked))
        ran = run(task, tmp_path / f"{steps}", steps=steps, **KEYS)
        assert ran.saved_steps[:-1] == list(range(7, steps, 7))
        figures.append(numpy.array((device.waits, device.copies, device.locked)) - before)
    (waits, copies, locked), (more_waits, more_copies, still_locked) = figures
    assert more_waits == waits, "four saves more, and nobody waited longer"
    assert more_copies == copies + 4
    assert still_locked == locked == 1


@of_two_kinds
def test_what_is_saved_is_the_state_after_its_step(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KEYS | {"steps": 30, "schedule": {"kind": "cosine", "warmup": 2}}
    device = with_device(monkeypatch)
    ahead = run(task, tmp_path / "ahead", **keys)
    assert device.copies == 5
    with_device(monkeypatch, copies_out=False)
    read_first = run(task, tmp_path / "read first", **keys)
    assert ahead.saved_steps == [7, 14, 21, 28, 30]
    assert states(ahead) == states(read_first)
    assert ahead.ended.digest == read_first.ended.digest


def test_a_change_that_is_not_held_back_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch)
    right = run(tasks.Adam, tmp_path / "right", steps=16, **KEYS)
    monkeypatch.setattr(Checkpointer, "_hold_back", lambda _: None)
    monkeypatch.setattr(Checkpointer, "is_settled", True)
    wrong = run(tasks.Adam, tmp_path / "wrong", steps=16, **KEYS)
    assert states(wrong)[7] != states(right)[7]


def test_a_run_goes_on_from_what_was_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch)
    whole = run(tasks.BatchNormAndDropout, tmp_path / "whole", steps=30, **KEYS)
    part = run(tasks.BatchNormAndDropout, tmp_path / "part", steps=30, stop_at=17, **KEYS)
    assert part.saved_steps == [7, 14, 17]
    CheckpointFolder(part.folder / "checkpoints").remove(CheckpointFolder(part.folder / "checkpoints").list()[-1].path)
    assert run(tasks.BatchNormAndDropout, part.folder, steps=30, **KEYS).ended.digest == whole.ended.digest


def test_where_the_step_of_a_save_is_left_out_a_later_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    void = next(step for step in poisoned_steps(epochs=2, batch_size=10) if step > 2)
    keys = SCHEDULED | {"evaluate": {"every": 1_000}, "checkpoint": {"every": void, "keep": 99}}
    device = with_device(monkeypatch)
    ahead = run(PoisonedAdam, tmp_path / "ahead", **keys)
    assert device.copies > len(ahead.saved_steps), "one of them came to nothing"
    with_device(monkeypatch, copies_out=False)
    read_first = run(PoisonedAdam, tmp_path / "read first", **keys)
    assert ahead.ended.digest == read_first.ended.digest
    assert void not in ahead.saved_steps, "its learning rate would be that of an update that was none"
    assert ahead.saved_steps[0] > void
    shared = states(ahead).keys() & states(read_first).keys()
    assert {step: states(ahead)[step] for step in shared} == {step: states(read_first)[step] for step in shared}


def test_a_replay_saves_the_state_before_its_step_also_where_that_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    void = next(step for step in poisoned_steps(epochs=2, batch_size=10) if step > 2)
    mode = RunMode(replayed_step=void + 1)
    monkeypatch.setattr(Loop, "mode", property(lambda _: mode, lambda *_: None), raising=False)
    with_device(monkeypatch)
    ran = run(PoisonedAdam, tmp_path / "run", **SCHEDULED | {"evaluate": {"every": 1_000}})
    assert void in skipped(ran)
    assert ran.saved_steps == [void, void + 1]


def test_nothing_is_saved_of_a_step_that_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    void = poisoned_steps(epochs=2, batch_size=10, seed=3, lanes=1)[0]
    assert void > 1, "the first step is read at once"
    device = with_device(monkeypatch)
    keys: dict[str, Any] = {"epochs": 2, "batch_size": 10, "lanes": 1, "seed": 3, "evaluate": {"every": 1_000}}
    ran = run(PoisonedAdam, tmp_path / "run", checkpoint={"every": void}, **keys)
    assert ran.ended.failure is not None
    assert device.copies == 1, "it was being copied when its loss was read"
    assert ran.saved_steps == []
