import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.errors import MetricError
from quorate.core.generation import Cursor, Phase
from quorate.spec.job import EarlyStopSpec, EvaluateSpec
from quorate.task.progress import Best, Progress

PATIENT = EarlyStopSpec(metric="loss", patience=2)


def after(values: list[float], stop: EarlyStopSpec | None = None, **keys: Any) -> Progress:
    evaluate = EvaluateSpec.model_validate(keys)
    progress = Progress()
    for value in values:
        progress = progress.after_step(10).after_evaluation({"loss": value, "accuracy": -value}, evaluate, stop)
    return progress


def test_steps_count_samples_and_evaluations_do_not() -> None:
    progress = after([3.0, 2.0]).after_step(4)
    assert progress.samples == 24
    assert progress.cursor == Cursor(3, Phase.TRAINED)
    assert after([3.0]).cursor == Cursor(1, Phase.EVALUATED)


@given(st.lists(st.floats(0, 4) | st.just(math.nan), min_size=1), st.sampled_from(["min", "max"]))
def test_a_state_is_the_best_exactly_where_an_evaluation_has_made_it_so(values: list[float], mode: str) -> None:
    progress = Progress()
    for value in values:
        trained = progress.after_step(10)
        assert not trained.is_best, "it is not evaluated yet, or changed since"
        evaluated = trained.after_evaluation({"loss": value}, EvaluateSpec.model_validate({"mode": mode}), None)
        assert evaluated.is_best == (evaluated.best is not progress.best)
        assert Progress.from_dict(json.loads(json.dumps(evaluated.to_dict()))).is_best == evaluated.is_best
        progress = evaluated


def test_bad_samples_are_counted_and_steps_without_a_good_one_as_long_as_none_follows() -> None:
    progress = Progress().after_step(0, bad=10, is_barren=True).after_step(0, bad=10, is_barren=True)
    assert (progress.bad, progress.barren, progress.samples) == (20, 2, 0)
    progress = progress.after_step(9, bad=1).after_evaluation({"loss": 1.0}, EvaluateSpec(), None, bad=3)
    assert (progress.bad, progress.barren, progress.bad_evaluated) == (21, 0, 3)
    again = Progress.from_dict(json.loads(json.dumps(progress.to_dict())))
    assert again == progress
    before = {name: value for name, value in progress.to_dict().items() if not name.startswith(("bad", "barren"))}
    assert Progress.from_dict(before).bad == 0, "of a checkpoint that does not know of it"


def test_the_best_value_keeps_its_step() -> None:
    assert after([3.0, 1.0, 2.0, 1.0]).best == Best(1.0, 2)
    assert after([3.0, 1.0, 2.0], mode="max").best == Best(3.0, 1)
    assert after([3.0, 1.0, 2.0], metric="accuracy", mode="max").best == Best(-1.0, 2)
    assert after([math.nan, 2.0, math.nan]).best == Best(2.0, 2)
    assert after([math.nan]).best is None


def test_without_a_loss_and_without_a_choice_there_is_no_best() -> None:
    progress = Progress().after_evaluation({"accuracy": 1.0}, EvaluateSpec(), None)
    assert progress.best is None
    assert progress.metrics == {"accuracy": 1.0}


def test_patience_counts_evaluations_that_were_no_better() -> None:
    assert [after(values, PATIENT).waited for values in ([3.0], [3.0, 3.0], [3.0, 4.0, 2.0])] == [0, 1, 0]
    assert not after([3.0, 4.0, 2.0, 2.5], PATIENT).early_stopped
    assert after([3.0, 4.0, 2.0, 2.5, 2.0], PATIENT).early_stopped
    assert after([math.nan, math.nan], PATIENT).early_stopped


def test_early_stop_may_watch_another_metric_than_best() -> None:
    stop = EarlyStopSpec(metric="accuracy", mode="min", patience=1)
    progress = after([1.0, 0.5], stop)
    assert progress.early_stopped
    assert progress.best == Best(0.5, 2)
    assert progress.patience_best == Best(-1.0, 1)


@pytest.mark.parametrize("key", ["evaluate.metric", "early_stop.metric"])
def test_a_metric_that_is_not_measured_is_named_with_those_that_are(key: str) -> None:
    evaluate = EvaluateSpec(metric="f1" if key.startswith("evaluate") else None)
    stop = EarlyStopSpec(metric="f1", patience=1) if key.startswith("early") else None
    with pytest.raises(MetricError, match=rf"{key}: there is no metric 'f1'; metrics\(\) gives loss, accuracy"):
        Progress().after_evaluation({"loss": 1.0, "accuracy": 0.5}, evaluate, stop)


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_progress_survives_a_checkpoint(values: list[float], patience: int, mode: str) -> None:
    progress = after(values, EarlyStopSpec.model_validate({"metric": "loss", "mode": mode, "patience": patience}))
    assert Progress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress
