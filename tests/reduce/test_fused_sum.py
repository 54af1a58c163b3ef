"""A fused sum is used only where it gives the bits of torch's additions."""

import logging
from collections.abc import Sequence

import pytest
import torch

from quorate.reduce import cuda_memory
from quorate.reduce.reduction import add_up
from reduce.reference import bits, wide_values

CPU = torch.device("cpu")


def in_order(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    add_up(terms[0], terms[1:], out)


def backwards(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    in_order(terms[::-1], out)


def rounded_once(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    out.copy_(torch.stack([term.double() for term in terms]).sum(0))


def without_denormals(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    in_order(terms, out)
    out[out.abs() < torch.finfo(out.dtype).smallest_normal] = 0.0


def from_zero(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    in_order([torch.zeros_like(out), *terms], out)


def test_one_that_adds_as_torch_does_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "fused_sum", lambda: in_order)
    assert cuda_memory.choose_sum(CPU) is in_order


@pytest.mark.parametrize("wrong", [backwards, rounded_once, without_denormals, from_zero], ids=lambda f: f.__name__)
def test_one_with_other_bits_is_not(
    wrong: cuda_memory.AddUp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_memory, "fused_sum", lambda: wrong)
    assert cuda_memory.choose_sum(CPU) is not wrong
    assert "a fused one has other bits" in caplog.text


def test_without_triton_torch_adds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = cuda_memory.choose_sum(CPU)
    assert "one kernel for each addition" in caplog.text
    terms = wide_values(5, 1001, seed=2)
    expected, given = torch.empty_like(terms[0]), torch.empty_like(terms[0])
    in_order(terms, expected)
    chosen(terms, given)
    assert bits(given) == bits(expected)
