import math
from pathlib import Path

import pytest

from checkpoint.only_part import part_of
from quorate.checkpoint.selection import Ranking, select
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RunError

LOWEST = Ranking("loss", "min")


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Step 2 as it was trained, and steps 4, 6 and 8 evaluated; 6 is the best."""
    checkpoints = CheckpointFolder(tmp_path)
    for step, phase, loss in ((2, 0, 0.1), (4, 1, 0.5), (6, 1, 0.3), (8, 1, 0.4)):
        checkpoints.save(
            {"progress": step},
            step=step,
            phase=phase,
            weights_digest="d",
            job={},
            environment={},
            metrics={"loss": loss, "accuracy": 1 - loss},
        )
    return checkpoints


def test_the_last_the_best_and_that_of_a_step(folder: CheckpointFolder) -> None:
    assert select("r", folder, "last", LOWEST).cursor.step == 8
    # The metrics of step 2 are those of an evaluation before it.
    assert select("r", folder, "best", LOWEST).cursor.step == 6
    assert select("r", folder, "best", Ranking("loss", "max")).cursor.step == 4
    assert select("r", folder, 2, LOWEST).cursor.step == 2
    assert select("r", folder, "0004", LOWEST).cursor.step == 4


@pytest.mark.parametrize(("mode", "best"), [("min", 6), ("max", 4)])
def test_one_whose_metric_is_not_a_number_is_never_the_best(folder: CheckpointFolder, mode: str, best: int) -> None:
    for step in (3, 9):
        metrics = {"loss": math.nan}
        folder.save({}, step=step, phase=1, weights_digest="d", job={}, environment={}, metrics=metrics)
    assert select("r", folder, "best", Ranking("loss", mode)).cursor.step == best


def test_a_damaged_one_is_no_choice(folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
    newest = folder.list()[-1].path
    part_of(newest).write_bytes(b"damaged")
    assert select("r", folder, "last", LOWEST).cursor.step == 6
    assert "checkpoint step-00000008-evaluated is damaged, so step-00000006-evaluated is used" in caplog.text
    with pytest.raises(RunError, match=r"1-of-1.*\.safetensors.* There are those of steps 2, 4, 6, 8\."):
        select("r", folder, 8, LOWEST)


@pytest.mark.parametrize(
    ("which", "ranking", "told"),
    [
        (5, LOWEST, "run r has no checkpoint of step 5. There are those of steps 2, 4, 6, 8."),
        ("newest", LOWEST, "'newest' is no checkpoint: give a step, last or best."),
        ("best", Ranking("f1", "max"), "no checkpoint of run r was saved at an evaluation with the metric 'f1'"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    folder: CheckpointFolder, which: str | int, ranking: Ranking, told: str
) -> None:
    with pytest.raises(RunError) as refused:
        select("r", folder, which, ranking)
    assert refused.value.message.startswith(told)


def test_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run r has no whole checkpoint"):
        select("r", CheckpointFolder(tmp_path), "last", LOWEST)
