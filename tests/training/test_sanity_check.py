"""metrics() is tried before the first step, in a process of its own."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gang
from bits.bit_tasks import Points, Regression
from quorate.core.errors import QuorateError, TaskError, UserCodeError
from quorate.replica.replica import Replica
from quorate.task.task import Task
from quorate.training import evaluation as checked
from quorate.training.evaluation import sanity_check_evaluation
from quorate.worker.assembly import build_samples, evaluation_plan

Answer = Callable[["Tried", nn.Module, Any], Any]


class Tried(Regression):
    answer: Any = None

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return type(self).answer(self, model, batch)


def sanity_check(answer: Answer | None = None, base: type[Task] = Tried, **keys: Any) -> Replica:
    task_type = base if answer is None else type("Made", (base,), {"answer": staticmethod(answer)})
    task, spec = task_type(), gang.job(base, **keys)
    replica, samples = Replica(task, spec), build_samples(task, spec)
    sanity_check_evaluation(task, replica, samples, evaluation_plan(spec, samples))
    return replica


def refused(answer: Answer | None = None, base: type[Task] = Tried, **keys: Any) -> QuorateError:
    with pytest.raises(QuorateError) as raised:
        sanity_check(answer, base, **keys)
    assert raised.value.exit_code == 2, "nothing was trained yet"
    return raised.value


def test_it_sees_one_batch_in_evaluation_mode_and_changes_nothing_here() -> None:
    def spoil(task: Tried, model: nn.Module, batch: Any) -> Any:
        assert (model.training, torch.is_grad_enabled(), len(batch[1])) == (False, False, 3)
        next(model.parameters()).zero_()
        task.spoilt = True  # type: ignore[attr-defined]
        return {"loss": 0.5}

    before = Replica(Tried(), gang.job(Tried)).weights_digest()
    replica = sanity_check(spoil)
    assert replica.weights_digest() == before
    assert all(module.training for module in replica.model.modules())


def test_a_mistake_in_metrics_is_told_before_it_costs_an_epoch() -> None:
    error = refused(lambda task, model, batch: {"loss": batch["missing"]})
    assert isinstance(error, UserCodeError)
    assert "(in metrics())" in error.message
    assert "test_sanity_check.py" in error.traceback
    error = refused(lambda task, model, batch: {"loss": None})
    assert isinstance(error, TaskError)
    assert error.message.startswith("metrics() returned nothing (None) as 'loss'")


class Remembers(Tried):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.count = 0


def test_what_the_first_evaluation_would_refuse_is_refused_before_the_first_step() -> None:
    def append(task: Any, *_: Any) -> Any:
        task.seen.append(1)
        return {"loss": 0.5}

    assert "'self.seen' (a list) was changed in metrics()" in refused(append, Remembers).message

    def assign(task: Any, *_: Any) -> Any:
        task.count += 1
        return {"loss": 0.5}

    sanity_check(assign, Remembers)


class BrokenValidation(Tried):
    def datasets(self) -> Any:
        class Broken(Points):
            def __getitem__(self, index: int) -> Any:
                raise OSError("torn")

        return Points(), Broken()


def test_a_validation_set_that_cannot_be_read_is_told_too() -> None:
    assert "OSError: torn (in sample 0 of the validation set)" in refused(lambda *_: {}, BrokenValidation).message


ACCURACY: dict[str, Any] = {"evaluate": {"every": 1, "metric": "accuracy"}}
EARLY: dict[str, Any] = {"evaluate": {"every": 1}, "early_stop": {"metric": "accuracy", "patience": 1}}


@pytest.mark.parametrize(("keys", "key"), [(ACCURACY, "evaluate.metric"), (EARLY, "early_stop.metric")])
def test_a_metric_that_is_watched_must_be_measured(keys: dict[str, Any], key: str) -> None:
    sanity_check(lambda *_: {"accuracy": 1.0}, **keys)
    told = refused(lambda *_: {"acuracy": 1.0}, **keys).message
    assert told == f"{key}: there is no metric 'accuracy'; metrics() gives acuracy. Did you mean acuracy?"
    # By default it is the loss, which the first step tries: no process is needed to know its name.
    told = refused(base=Regression, **keys).message
    assert told.endswith("no metric 'accuracy'; metrics() gives loss alone, as for a task without metrics().")


class Unvalidated(Tried):
    def datasets(self) -> Any:
        return Points()


def test_a_metric_that_is_watched_needs_a_validation_set() -> None:
    sanity_check(lambda *_: 1 / 0, Unvalidated)
    assert refused(base=Unvalidated, **EARLY).message == (
        "early_stop.metric: 'accuracy' is measured on the validation set, and datasets() returned none. "
        "Return (training set, validation set), or leave early_stop out."
    )


@pytest.mark.parametrize(
    "answer", [lambda *_: os.kill(os.getpid(), signal.SIGKILL), lambda *_: time.sleep(60)], ids=["dies", "hangs"]
)
def test_what_keeps_it_from_an_answer_is_only_logged(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checked, "SANITY_LIMIT", 0.2)
    sanity_check(answer)
    assert "metrics() could not be tried before the first step" in caplog.text
