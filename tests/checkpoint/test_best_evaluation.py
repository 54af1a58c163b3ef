"""Which evaluation is the best, and which checkpoints are of another job."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import BestEvaluation, Watched, best_of, better_of
from quorate.checkpoint.selection import why_foreign
from quorate.spec.job import JobSpec

LOWEST, HIGHEST = Watched("loss", "min"), Watched("accuracy", "max")


@pytest.mark.parametrize(
    ("job", "watched"),
    [
        ({}, LOWEST),
        ({"evaluate": 5}, LOWEST),
        ({"evaluate": {"every": 5}}, LOWEST),
        ({"evaluate": {"metric": "accuracy", "mode": "max"}}, HIGHEST),
        ({"evaluate": {"metric": "error", "mode": "min"}}, Watched("error", "min")),
    ],
)
def test_what_is_watched_is_what_the_job_says(job: dict[str, Any], watched: Watched) -> None:
    assert Watched.by(job) == watched


def test_the_best_is_the_lowest_or_the_highest_and_the_earlier_of_two() -> None:
    evaluations = {
        2: {"loss": 0.5, "accuracy": 0.1},
        4: {"loss": 0.25, "accuracy": 0.9},
        6: {"loss": 0.25, "accuracy": 0.9},
    }
    assert best_of(evaluations, LOWEST) == BestEvaluation(LOWEST, 0.25, 4)
    assert best_of(evaluations, HIGHEST) == BestEvaluation(HIGHEST, 0.9, 4)
    assert better_of([None, BestEvaluation(HIGHEST, 0.9, 4), BestEvaluation(HIGHEST, 0.95, 8)]) == BestEvaluation(
        HIGHEST, 0.95, 8
    )
    assert better_of([None]) is None


def test_what_is_no_number_is_never_the_best() -> None:
    evaluations: dict[int, dict[str, Any]] = {
        1: {"loss": float("nan")},
        2: {"loss": True},
        3: {},
        4: {"loss": "0.1"},
        5: {"loss": 7},
    }
    assert best_of(evaluations, LOWEST) == BestEvaluation(LOWEST, 7.0, 5)
    assert best_of({1: {"loss": float("nan")}}, LOWEST) is None


MEANING: dict[str, Any] = {"task": "a.py:Task", "steps": 10, "lanes": 4, "batch_size": 8, "seed": 7}


def of_job(**job: Any) -> CheckpointInfo:
    return cast(CheckpointInfo, SimpleNamespace(manifest=SimpleNamespace(job=job)))


class TestForeign:
    def spec(self, **changes: Any) -> JobSpec:
        return JobSpec.model_validate(MEANING | changes)

    def test_is_not_one_that_means_the_same_wherever_its_task_is(self) -> None:
        assert why_foreign(of_job(**MEANING), self.spec()) == ""
        assert why_foreign(of_job(**MEANING), self.spec(task="b.py:Task")) == ""

    def test_nor_one_of_another_version_that_cannot_be_read(self) -> None:
        assert why_foreign(of_job(nonsense=True), self.spec()) == ""

    def test_is_one_that_means_something_else_and_that_is_said(self) -> None:
        assert why_foreign(of_job(**MEANING), self.spec(seed=8)) == "its job has seed 7 where the run has 8"
        three = why_foreign(of_job(**MEANING), self.spec(seed=8, lanes=2, batch_size=4))
        assert (three.count(" where "), "more" in three) == (3, False)
        four = why_foreign(of_job(**MEANING), self.spec(seed=8, lanes=2, batch_size=4, accumulate=2))
        assert four.count(" where ") == 3
        assert four.endswith(" and 1 more")
