"""What every tracker promises, held by the real ones: points are there once, whoever gives them again."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from command import await_condition
from quorate.history.curves import Point
from quorate.spec.job import JobSpec
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import FOLDER
from quorate.tracking.mlflow_client import MlflowTracker
from quorate.tracking.tensorboard_tracker import TensorBoardTracker
from quorate.tracking.tensorboard_tracker import read_back as read_tensorboard
from quorate.tracking.tracker import Tracker
from quorate.tracking.wandb_tracker import WandbTracker, read_values
from services.mlflow_database import Database
from services.servers import MlflowServer

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

SPEC = JobSpec(task="task.py:T", name="contract", batch_size=8, steps=3)
Curve = dict[str, list[tuple[int, float]]]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", f"contract-{tmp_path.name}"[:90])
    (run.path / FOLDER).mkdir()
    return run


def by_name(points: Iterable[tuple[str, int, float]]) -> Curve:
    curves: Curve = {}
    for name, step, value in points:
        curves.setdefault(name, []).append((step, float(value)))
    return curves


@pytest.fixture(params=["mlflow", "mlflow in a file", "tensorboard", "wandb"])
def kind(request: pytest.FixtureRequest, run: RunFolder) -> tuple[Callable[[], Tracker], Callable[[], Curve]]:
    """How a process makes it, and what can be read back of it."""
    if request.param == "tensorboard":
        read = read_tensorboard
        return lambda: TensorBoardTracker(run), lambda: by_name(
            (point.name, point.step, point.value) for point in read(run.path / "tensorboard")
        )
    if request.param == "wandb":
        return lambda: WandbTracker(run, SPEC, "offline"), lambda: by_name(read_values(run.path / "wandb"))
    if request.param == "mlflow":
        server: MlflowServer = request.getfixturevalue("mlflow_server")
        uri, file = server.uri, server.folder / "server.db"
    else:
        file = run.path.parent / "mlflow.db"
        uri = f"sqlite:///{file}"
    return lambda: MlflowTracker(run, SPEC, uri), lambda: Database(file).curves(run.name)


def points(*steps: int, begin: float = 1.0) -> list[Point]:
    made = [Point("train/loss", 1 / step, step, begin + step) for step in steps]
    made.insert(1, Point("system/cpu_percent", 2.0, steps[0], begin + steps[0]))
    return made


def test_points_are_there_once(kind: tuple[Callable[[], Tracker], Callable[[], Curve]]) -> None:
    make, read = kind
    first = make()
    assert first.begin() is False, "nothing is there"
    first.log(points(1, 2, 3))
    first.log([Point("val/odd", math.nan, 3, 5.0), Point("val/huge", math.inf, 3, 5.0)])
    first.series.curves.update({"train/loss": [(1, 1.0), (2, 0.5)], "val/odd": [(3, math.nan)]})
    first.finish("interrupted")
    ended = int(time.time())
    # Another process is never so quick: W&B names its folders by the second.
    await_condition("the next second", lambda: int(time.time()) > ended)
    again = make()
    again.begin()
    again.log(points(1, 2, 3))  # as they were
    anew = [point for point in points(2, 3, 4, begin=100.0) if not point.is_sample]
    again.log(anew)  # by a file that tells them anew
    again.log(points(5))
    again.finish("complete")
    curves = read()
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in curves["train/loss"]] == pytest.approx([1 / step for step in (1, 2, 3, 4, 5)])
    assert [step for step, _ in curves["system/cpu_percent"]] == [1, 5]
    assert (len(curves["val/odd"]), len(curves["val/huge"])) == (1, 1)
    assert math.isnan(curves["val/odd"][0][1])
    assert curves["val/huge"][0][1] > 1e300


def test_one_that_has_lost_everything_asks_for_all(
    kind: tuple[Callable[[], Tracker], Callable[[], Curve]], run: RunFolder
) -> None:
    make, _ = kind
    first = make()
    first.begin()
    assert first.begin() is False, "a run without points holds nothing"


def test_looks_at_the_machine_are_kept_whatever_their_step(
    kind: tuple[Callable[[], Tracker], Callable[[], Curve]],
) -> None:
    """A worker that is looked at may be a step behind the one that tells of steps, or ahead of it."""
    make, read = kind
    tracker = make()
    tracker.begin()
    told = [
        Point("train/loss", 1.0, 4, 1.0),
        Point("system/cpu_percent", 1.0, 6, 2.0),
        Point("train/loss", 1.0, 5, 3.0),
        Point("system/cpu_percent", 2.0, 3, 4.0),
        Point("train/loss", 1.0, 6, 5.0),
    ]
    assert tracker.log(told) == 5
    tracker.finish("complete")
    again = make()
    again.begin()
    assert again.log(told) == 0
    curves = read()
    assert [step for step, _ in curves["train/loss"]] == [4, 5, 6]
    assert sorted(value for _, value in curves["system/cpu_percent"]) == [1.0, 2.0]


def test_names_that_mlflow_does_not_take_are_kept_under_others(run: RunFolder, mlflow_server: MlflowServer) -> None:
    tracker = MlflowTracker(run, SPEC, mlflow_server.uri)
    tracker.begin()
    tracker.log(
        [Point("train/50% off?", 1.0, 1, 1.0), Point("train//x", 2.0, 1, 1.0), Point("train/" + "y" * 300, 3.0, 1, 1.0)]
    )
    curves = Database(mlflow_server.folder / "server.db").curves(run.name)
    assert set(curves) == {"train/50_ off_", "train/x", ("train/" + "y" * 300)[:250]}
