"""Any step of a run, trained again on any number of workers, has the state that the run had."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from proof.proven_runs import checkpoints, copied, edit_loss, trainer
from quorate.api.run_part import Accept, Show
from quorate.api.warm import WarmRunner
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.places import Outcome
from quorate.core.errors import RequestError, RunError
from quorate.core.failure import JobFailed
from quorate.history.identity import Identity
from quorate.proof.again import recreate, state_digest
from quorate.proof.replay import Debugger
from quorate.storage.run_folder import RunFolder
from quorate.supervisor.signals import Signals
from quorate.supervisor.supervisor import Launch

pytestmark = pytest.mark.usefixtures("unmeasured")


def digest(run: RunFolder, step: int) -> str:
    return state_digest(CheckpointFolder.at(run.checkpoints), checkpoints(run)[step])


@pytest.mark.parametrize(("step", "workers", "kept"), [(8, 1, ()), (16, 3, (4, 12)), (20, 2, (16,))])
def test_a_step_has_the_state_that_was_kept_aside(
    runner: WarmRunner, run: RunFolder, tmp_path: Path, step: int, workers: int, kept: tuple[int, ...]
) -> None:
    pruned = copied(run, f"pruned-{step}", set(kept))
    before = {path: path.stat().st_mtime_ns for path in pruned.path.rglob("*")}
    again = recreate(trainer(runner, pruned), step, tmp_path / "again", workers)
    assert again.difference is None
    assert (again.from_step, again.workers) == (max(kept, default=0), workers)
    assert again.compared == step - again.from_step
    assert again.state_digest == digest(run, step)
    assert {path: path.stat().st_mtime_ns for path in pruned.path.rglob("*")} == before
    assert list(checkpoints(again.run)) == [step]
    assert (Identity.of_run(again.run) is None) == bool(kept), "a part of a run is no known result"
    shutil.rmtree(pruned.path)


def test_what_differs_is_named_with_the_first_step(runner: WarmRunner, run: RunFolder, tmp_path: Path) -> None:
    other = copied(run, "edited", {8})
    loss = edit_loss(other, 10)
    again = recreate(trainer(runner, other), 11, tmp_path / "again", 1)
    assert again.difference is not None
    assert again.difference.step == 10
    assert list(again.difference.values) == ["loss"]
    assert again.difference.values["loss"][1] == loss


def test_a_step_that_is_not_there_is_refused(runner: WarmRunner, run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has recorded no step 21: its last is 20"):
        recreate(trainer(runner, run), 21, tmp_path / "again")
    with pytest.raises(RequestError, match="is already there"):
        recreate(trainer(runner, run), 4, tmp_path)
    assert not (tmp_path / "again").exists()


def test_an_interruption_leaves_nothing_behind(runner: WarmRunner, run: RunFolder, tmp_path: Path) -> None:
    def interrupted(launch: Launch, show: Show, accept: Accept, signals: Signals) -> Outcome:
        signals.received.append(signal.SIGINT)
        return runner(launch, show, accept, signals)

    with pytest.raises(JobFailed, match="interrupted; run small-0001 is as it was"):
        recreate(replace(trainer(runner, run), runner=interrupted), 7, tmp_path / "again", 1)
    assert not (tmp_path / "again").exists()


def test_the_state_of_a_running_run_is_read_before_its_checkpoint_is_removed(
    runner: WarmRunner, run: RunFolder, tmp_path: Path
) -> None:
    other = copied(run, "running", {4})

    def removed(launch: Launch, show: Show, accept: Accept, signals: Signals) -> Outcome:
        shutil.rmtree(checkpoints(other)[4].path)
        return runner(launch, show, accept, signals)

    again = recreate(replace(trainer(runner, other), runner=removed), 4, tmp_path / "again", 1)
    assert (again.difference, again.state_digest) == (None, digest(run, 4))


def test_a_folder_of_somebody_else_stays(runner: WarmRunner, run: RunFolder, tmp_path: Path) -> None:
    def full(*_: object) -> Outcome:
        raise OSError(28, "No space left on device")

    (tmp_path / "theirs").mkdir()
    with pytest.raises(RequestError, match="is already there"):
        recreate(trainer(runner, run), 4, tmp_path / "theirs")
    assert (tmp_path / "theirs").is_dir()
    with pytest.raises(OSError, match="No space left"):
        recreate(replace(trainer(runner, run), runner=full), 4, tmp_path / "again", 1)
    assert not (tmp_path / "again").exists()


class Inherits:
    @staticmethod
    def loss(model: int, batch: int) -> int:
        return model + batch


class Inherited(Inherits):
    pass


@pytest.mark.parametrize("kind", [Inherits, Inherited])
def test_a_static_or_inherited_loss_is_heard_and_is_as_before_afterwards(kind: type[Inherits]) -> None:
    told, before = list[tuple[int, object]](), dict(vars(kind))
    with Debugger(lambda lane, loss: told.append((lane, loss)))._around(kind, lambda: 3):
        assert kind().loss(1, 2) == 3
    assert told == [(3, 3)]
    assert dict(vars(kind)) == before
