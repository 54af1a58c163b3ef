from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.only_part import part_of
from checkpoint.whole_save import save_whole
from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import BestEvaluation, Watched
from quorate.checkpoint.selection import select
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import RunError


def best_at(step: int) -> Callable[[], BestEvaluation]:
    return lambda: BestEvaluation(Watched("loss", "min"), 0.3, step)


LOWEST = best_at(6)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Step 2 as it was trained, and steps 4, 6 and 8 evaluated; 6 is the best."""
    checkpoints = CheckpointFolder(tmp_path)
    for step, phase, loss in ((2, 0, 0.1), (4, 1, 0.5), (6, 1, 0.3), (8, 1, 0.4)):
        save_whole(
            checkpoints,
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
    assert select("r", folder, "last", best_at(6)).cursor.step == 8
    assert select("r", folder, "best", best_at(6)).cursor.step == 6
    assert select("r", folder, 2, best_at(6)).cursor.step == 2
    assert select("r", folder, "0004", best_at(6)).cursor.step == 4


def test_the_best_is_the_one_of_the_record_whatever_the_metrics_of_those_that_are_there(
    folder: CheckpointFolder,
) -> None:
    assert select("r", folder, "best", best_at(4)).cursor.step == 4
    folder.remove(folder.folder / "step-00000006-evaluated")
    with pytest.raises(RunError) as refused:
        select("r", folder, "best", best_at(6))
    assert refused.value.message.startswith(
        "the best evaluation of run r is that of step 6 (loss 0.3), whose checkpoint is not there: "
    )
    assert "There are those of steps 2, 4, 8. Choose one of them by its step" in refused.value.message


def test_a_damaged_one_is_no_choice(folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
    newest = folder.list()[-1].path
    part_of(newest).write_bytes(b"damaged")
    assert select("r", folder, "last", LOWEST).cursor.step == 6
    assert "checkpoint step-00000008-evaluated is damaged, so step-00000006-evaluated is used" in caplog.text
    with pytest.raises(RunError, match=r"1-of-1.*\.safetensors.* There are those of steps 2, 4, 6, 8\."):
        select("r", folder, 8, LOWEST)


@pytest.mark.parametrize(
    ("which", "best", "told"),
    [
        (5, LOWEST, "run r has no checkpoint of step 5. There are those of steps 2, 4, 6, 8."),
        ("newest", LOWEST, "'newest' is not a checkpoint: give a step, last or best."),
        ("best", lambda: None, "run r has no evaluation yet that could be the best. There are those of steps 2, 4, 6"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    folder: CheckpointFolder, which: str | int, best: Callable[[], BestEvaluation | None], told: str
) -> None:
    with pytest.raises(RunError) as refused:
        select("r", folder, which, best)
    assert refused.value.message.startswith(told)


def test_a_run_without_any(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run r has no valid checkpoint"):
        select("r", CheckpointFolder(tmp_path), "last", LOWEST)


class TestOneOfAnotherRun:
    """It lies in the run's folder because somebody has copied it there."""

    @staticmethod
    def _of_step_8(info: CheckpointInfo) -> str:
        return "its job has seed 7 where the run has 0" if info.cursor.step == 8 else ""

    def test_is_passed_over_and_named(self, folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
        assert select("r", folder, "last", LOWEST, self._of_step_8).cursor.step == 6
        assert "step-00000008-evaluated is not of this run, so step-00000006-evaluated is used" in caplog.text

    @pytest.mark.parametrize("which", ["best", "8"])
    def test_is_not_taken_by_its_step_either(
        self, folder: CheckpointFolder, which: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(RunError, match="There are those of steps 2, 4, 6"):
            select("r", folder, which, best_at(8), self._of_step_8)
        assert "step-00000008-evaluated is not of this run: its job has seed 7" in caplog.text

    def test_is_taken_where_all_are(self, folder: CheckpointFolder) -> None:
        """Then it is the job that was changed."""
        for which in ("last", "best", "8"):
            assert select("r", folder, which, best_at(8), lambda _: "other").cursor.step == 8
