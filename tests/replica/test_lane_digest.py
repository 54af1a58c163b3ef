"""Any bit of a gradient that differs shows in its digest, on the host and in the sum that a device makes."""

import random

import pytest
import torch
from torch import nn

from quorate.replica.device import CPU
from quorate.replica.gradients import LoneGradients
from quorate.replica.lane_digest import _halves, _on_device, _on_host, collected, joined_halves, lane_digests

TYPES = [torch.float32, torch.bfloat16, torch.float64]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def read(digest: torch.Tensor) -> int:
    return joined_halves([float(half) for half in _halves(digest)])[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    chance = random.Random(3)
    tensors = [torch.randn(61, generator=torch.Generator().manual_seed(1)).to(dtype), torch.zeros(7, dtype=dtype)]
    before, there = _on_host(tensors, CPU), read(_on_device(tensors))
    width = 8 * dtype.itemsize
    for bit in range(width):
        tensor = tensors[bit % 2]
        raw, place = tensor.view(INTEGERS[dtype]), chance.randrange(len(tensor))
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        raw[place] ^= mask
        assert _on_host(tensors, CPU) != before
        assert read(_on_device(tensors)) != there
        raw[place] ^= mask
    assert (_on_host(tensors, CPU), read(_on_device(tensors))) == (before, there)


def test_the_place_of_a_number_counts_on_a_device_too() -> None:
    one, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    assert read(_on_device([one])) != read(_on_device([other]))
    assert read(_on_device([one, other])) != read(_on_device([other, one]))
    assert read(_on_device([])) == 0


def test_the_halves_of_a_digest_make_the_whole_of_it() -> None:
    for number in (0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF):
        assert read(torch.tensor(number)) == number % 2**64


def test_a_parameter_without_a_gradient_has_a_digest_of_nothing() -> None:
    model = nn.Linear(2, 2)
    gradients = LoneGradients(list(model.named_parameters()))
    gradients.begin(0)
    gradients.backward(model.weight.sum(), 1.0)
    gradients.finish()
    whole, weight, bias = lane_digests(
        collected(gradients, by_tensor=False) + collected(gradients, by_tensor=True), CPU
    )
    assert whole == weight
    assert bias == lane_digests([()], CPU)[0]
