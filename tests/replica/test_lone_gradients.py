"""A job with one lane has the gradients of plain PyTorch, and refuses what would change them behind our back."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from quorate.core.errors import UnsupportedModelError
from quorate.replica.device import CPU
from quorate.replica.gradients import LoneGradients


class Lone:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.bias = nn.Parameter(torch.tensor([3.0]))
        self.gradients = LoneGradients([("weight", self.weight), ("bias", self.bias)])
        self.gradients.begin(0)


def test_passes_add_up_with_their_weights_and_what_has_none_keeps_none() -> None:
    lone = Lone()
    lone.gradients.backward(lone.weight.sum(), 0.25)
    lone.gradients.backward(lone.weight.square().sum(), 0.5)
    assert lone.gradients.finish() == 0b01
    lone.gradients.install(0b01)
    assert lone.weight.grad is not None
    assert lone.weight.grad.tolist() == [1.25, -1.75]
    assert lone.bias.grad is None
    assert lone.gradients.total_norm(CPU) == pytest.approx((1.25**2 + 1.75**2) ** 0.5)


def test_a_gradient_lies_as_if_it_were_by_itself() -> None:
    """Autograd may leave a part of something larger, and a GPU adds up its norm in another order then."""
    parts = nn.ParameterList([torch.zeros(3), torch.zeros(8)])
    gradients = LoneGradients(list(parts.named_parameters()))
    gradients.begin(0)
    gradients.backward((torch.cat(list(parts)) * torch.arange(11.0)).sum(), 1.0)
    assert gradients.finish() == 0b11
    assert parts[1].grad is not None
    assert parts[1].grad.data_ptr() % 16, "a part of the gradient of both"
    gradients.install(0b11)
    assert parts[1].grad.data_ptr() % 64 == 0
    assert parts[1].grad.tolist() == list(range(3, 11))


def test_a_step_starts_afresh() -> None:
    lone = Lone()
    for _ in range(2):
        lone.gradients.begin(0)
        lone.gradients.backward(lone.bias.sum(), 1.0)
        assert lone.gradients.finish() == 0b10
    assert lone.bias.grad is not None
    assert lone.bias.grad.tolist() == [1.0]


def test_without_any_gradient_the_norm_is_zero() -> None:
    lone = Lone()
    lone.gradients.backward(nn.Parameter(torch.ones(2)).sum(), 1.0)
    assert lone.gradients.finish() == 0
    assert lone.gradients.total_norm(CPU) == 0.0


def test_a_step_without_samples_leaves_no_gradient() -> None:
    lone = Lone()
    lone.gradients.backward(lone.weight.sum(), 1.0)
    lone.gradients.clear(0)
    assert lone.weight.grad is None
    assert lone.gradients.total_norm(CPU) == 0.0
    lone.gradients.begin(0)
    lone.gradients.backward(lone.bias.sum(), 1.0)
    assert lone.gradients.finish() == 0b10


def test_the_norm_is_over_all_types() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64, torch.float32)]
    gradients = LoneGradients([(str(parameter.dtype), parameter) for parameter in parameters])
    gradients.begin(0)
    gradients.backward(sum((parameter.sum().double() for parameter in parameters), torch.tensor(0.0)), 2.0)
    gradients.finish()
    assert gradients.total_norm(CPU) == pytest.approx(2 * 6**0.5, rel=1e-2)


def clear_between(lone: Lone) -> None:
    lone.gradients.backward(lone.weight.sum(), 1.0)
    lone.weight.grad = None
    lone.gradients.backward(lone.weight.sum(), 1.0)


def replace_at_the_end(lone: Lone) -> None:
    lone.gradients.backward(lone.weight.sum(), 1.0)
    lone.weight.grad = torch.zeros(2)
    lone.gradients.finish()


def backward_in_loss(lone: Lone) -> None:
    lone.weight.sum().backward()  # type: ignore[no-untyped-call]
    lone.gradients.backward(lone.weight.sum(), 1.0)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (clear_between, "'weight' was detached"),
        (replace_at_the_end, "'weight' was detached"),
        (backward_in_loss, r"'weight' was computed by the task itself"),
    ],
)
def test_interference_is_refused_by_name(act: Callable[[Lone], None], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        act(Lone())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    rows = nn.Embedding(4, 2, sparse=True)
    gradients = LoneGradients(list(rows.named_parameters()))
    gradients.begin(0)
    gradients.backward(rows(torch.tensor([1])).sum(), 1.0)
    with pytest.raises(UnsupportedModelError, match="sparse=False"):
        gradients.finish()
