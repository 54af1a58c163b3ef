import re
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from quorate.core.errors import MetricError, UserCodeError
from quorate.replica.device import CPU
from quorate.task.task import Task
from quorate.training.measurement import measured


class Gives(Task):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return self.answer


def of(answer: Any) -> dict[str, tuple[float, float]]:
    return measured(Gives(answer), nn.Linear(1, 1), None, samples=4, device=CPU).sums


@pytest.mark.parametrize(
    ("value", "sums"),
    [
        (0.5, (2.0, 4.0)),
        (1, (4.0, 4.0)),
        (True, (4.0, 4.0)),
        (torch.tensor(0.5), (2.0, 4.0)),
        (torch.tensor([0.5]), (2.0, 4.0)),
        (numpy.float32(0.5), (2.0, 4.0)),
        ((3, torch.tensor(6)), (3.0, 6.0)),
    ],
)
def test_a_number_or_a_sum_with_its_count(value: Any, sums: tuple[float, float]) -> None:
    assert of({"accuracy": value}) == {"accuracy": sums}


ONE_NUMBER = "a metric is one number, the mean over the samples of the batch, or (sum, count)."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "metrics() returned nothing (None); it must return a dict of numbers by name. Is a `return` missing?"),
        (0.5, "metrics() returned the float 0.5; it must return a dict of numbers by name."),
        ({"f1": None}, f"metrics() returned nothing (None) as 'f1'; {ONE_NUMBER}"),
        ({"f1": "0.5"}, f"metrics() returned the text \"0.5\" as 'f1'; {ONE_NUMBER}"),
        (
            {"f1": torch.ones(3)},
            f"metrics() returned a Tensor of shape (3,) as 'f1'; {ONE_NUMBER} Take its mean: .mean().",
        ),
        ({"f1": [1.0, 2.0]}, f"metrics() returned a list of 2 values as 'f1'; {ONE_NUMBER}"),
        ({"f1": (1.0, 2.0, 3.0)}, "metrics() returned a tuple of 3 values as 'f1'; a tuple must be (sum, count)"),
        ({"f1": (1.0, None)}, "metrics() returned nothing (None) as 'f1' in (sum, count); a metric is one number"),
    ],
)
def test_what_is_no_metric_is_named_with_what_was_given(answer: Any, text: str) -> None:
    with pytest.raises(MetricError, match=re.escape(text)):
        of(answer)


def test_an_exception_in_metrics_is_the_users() -> None:
    class Raises(Task):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            raise KeyError("labels")

    with pytest.raises(UserCodeError, match=r"KeyError: 'labels' \(in metrics\(\)\)"):
        measured(Raises(), nn.Linear(1, 1), None, 4, CPU)


@pytest.mark.parametrize(("value", "words"), [(torch.ones(2), "a Tensor of shape (2,)"), (None, "nothing (None)")])
def test_what_is_logged_must_be_a_number_too(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"self.log('size', ...) takes one number, and was given {words}")):
        Task().log("size", value)
