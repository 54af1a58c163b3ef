"""Exceptions of torch itself, as a newcomer meets them: the hint is there, and is about what was done."""

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quorate.spec.job import JobSpec
from quorate.training.hints import Share, hint_for


def raised_by(mistake: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:
        mistake()
    assert isinstance(raised.value, Exception)
    return raised.value


def share(samples: int, batch_samples: int, **keys: object) -> Share:
    usual = {"task": "a.b:C", "batch_size": 4, "lanes": 4, "steps": 1}
    return Share(samples, batch_samples, JobSpec.model_validate({**usual, **keys}))


def lonely() -> object:
    return nn.BatchNorm1d(2)(torch.zeros(1, 2))


DOUBLES = torch.from_numpy(numpy.ones((2, 1, 3, 3)))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: nn.Linear(3, 2)(DOUBLES), ".float()"),
        (lambda: nn.Conv2d(1, 2, 3)(DOUBLES), ".float()"),
        (lambda: nn.Linear(3, 2)(torch.ones(2, 3, dtype=torch.long)), ".float()"),
        (lambda: F.cross_entropy(torch.zeros(2, 3), torch.ones(2)), ".long()"),
        (lambda: F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3])), "a model with at least 4 outputs"),
    ],
)
def test_a_mistake_that_torch_tells_in_its_own_terms_gets_a_hint(mistake: Callable[[], object], words: str) -> None:
    assert words in hint_for(raised_by(mistake))


def test_a_kernel_that_is_not_deterministic_names_the_key() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        error = raised_by(lambda: torch.zeros(4).put_(torch.tensor([0]), torch.ones(1)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert hint_for(error).startswith("`deterministic: false` in the job file allows it")


def test_a_graph_that_is_used_twice() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = weight.square().sum()
    torch.autograd.backward(loss)
    assert ".detach()" in hint_for(raised_by(lambda: torch.autograd.backward(loss)))


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (share(1, 4), "4 samples for 4 lanes (batch_size: 4). Use a batch_size of at least 8, or use fewer lanes."),
        (
            share(1, 8, batch_size=8, accumulate=2),
            "8 samples for 4 lanes × accumulate 2 (batch_size: 8). "
            "Use a batch_size of at least 16, or use fewer lanes.",
        ),
        (
            share(1, 5, batch_size=8, last_batch="keep"),
            "5 samples for 4 lanes (batch_size: 8; last_batch: keep). "
            "Drop such a rest (last_batch: drop), or use fewer lanes.",
        ),
    ],
)
def test_a_single_sample_cannot_be_normalized(shared: Share, words: str) -> None:
    hint = hint_for(raised_by(lonely), shared)
    assert hint.startswith("Batch normalization needs at least 2 samples at a time, and this lane had 1: ")
    assert hint.endswith(words)


def test_what_is_not_surely_right_is_not_said() -> None:
    assert hint_for(raised_by(lonely), share(3, 12)) == ""
    assert hint_for(raised_by(lambda: nn.Linear(3, 2)(torch.zeros(2, 4)))) == ""
    assert hint_for(KeyError("labels")) == ""
