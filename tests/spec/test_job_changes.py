from typing import Any

import pytest

from quorate.spec.changes import changes, refused_on_resume
from quorate.spec.job import JobSpec
from quorate.spec.keys import Mark

MINIMAL: dict[str, Any] = {"task": "a.b:C", "batch_size": 64, "epochs": 3, "params": {"rate": 1}}


def job(**changed: Any) -> JobSpec:
    return JobSpec.model_validate({**MINIMAL, **changed})


def test_equal_jobs_have_no_changes() -> None:
    assert changes(job(), job(strategy={"kind": "ring"})) == ()


@pytest.mark.parametrize(
    ("changed", "told_as", "mark"),
    [
        ({"lanes": 4}, "lanes: 8 → 4", Mark.MEANING),
        ({"params": {"rate": 2}}, "params.rate: 1 → 2", Mark.MEANING),
        ({"params": {"rate": True}}, "params.rate: 1 → true", Mark.MEANING),
        ({"params": {"rate": 1.0}}, "params.rate: 1 → 1.0", Mark.MEANING),
        ({"params": {"rate": 1, "decay": None}}, "params.decay: not given → null", Mark.MEANING),
        ({"params": {}}, "params.rate: 1 → not given", Mark.MEANING),
        ({"evaluate": {"every": 5}}, "evaluate.every: epoch → 5", Mark.MEANING),
        ({"checkpoint": {"keep": 9}}, "checkpoint.keep: 3 → 9", Mark.MANNER),
        ({"workers": 2}, "workers: auto → 2", Mark.MANNER),
        ({"name": "other"}, "name: job → other", Mark.LABEL),
        ({"epochs": 4}, "epochs: 3 → 4", Mark.MEANING),
    ],
)
def test_a_change_has_its_key_both_values_and_a_mark(changed: dict[str, Any], told_as: str, mark: Mark) -> None:
    (change,) = changes(job(), job(**changed))
    assert (str(change), change.mark) == (told_as, mark)


def test_a_section_that_appears_is_one_change() -> None:
    (change,) = changes(job(), job(schedule={"kind": "cosine"}))
    assert (change.key, change.before) == ("schedule", None)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"workers": 2, "failure_timeout": 1, "checkpoint": {"every": 1}, "runs": "x", "name": "y"}, []),
        ({"epochs": 4}, []),
        ({"epochs": 2}, ["epochs"]),
        ({"epochs": None, "steps": 1000}, ["epochs", "steps"]),
        ({"seed": 1, "workers": 2, "epochs": 9}, ["seed"]),
        ({"task": "a.b:D"}, ["task"]),
    ],
)
def test_a_resumed_run_may_change_its_manner_and_train_longer(changed: dict[str, Any], refused: list[str]) -> None:
    assert [change.key for change in refused_on_resume(job(), job(**changed))] == refused


def test_more_steps_are_an_extension_too() -> None:
    short, long = job(epochs=None, steps=10), job(epochs=None, steps=11)
    assert refused_on_resume(short, long) == ()
    assert [change.key for change in refused_on_resume(long, short)] == ["steps"]
