"""Samples as bytes and back: exactly as they were, or refused."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from quorate.shards.decoded_cache import NotEncodable, _order, decode, encode

SAMPLES: list[Any] = [
    None, True, -(2**80), 1.5, float("inf"), "text ä\n", b"", b"bytes", (), [], {},
    {"a": [1, (2, {"b": None})], "": "x"},
    torch.arange(6).reshape(2, 3), torch.zeros(0, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.tensor([True]),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1), torch.randn(3, 4)[:, ::2],
    torch.zeros(2, dtype=torch.complex64),
    numpy.arange(6, dtype=">i4").reshape(3, 2), numpy.asfortranarray(numpy.eye(3)), numpy.float16(1.5),
    numpy.array(7), numpy.zeros((0, 2)), numpy.array(["ab", "c"]), numpy.datetime64("2026-01-01"),
]  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_samples_come_back_exactly_as_they_were(sample: Any) -> None:
    again = decode(encode({"before": b"x", "it": sample, "behind": torch.ones(2)}))
    assert again["before"] == b"x"
    assert torch.equal(again["behind"], torch.ones(2))
    assert type(again["it"]) is type(sample)
    if isinstance(sample, torch.Tensor):
        assert again["it"].dtype == sample.dtype
        assert torch.equal(again["it"], sample)
        assert again["it"].permute(_order(sample.stride())).is_contiguous(), "laid out as it was, without gaps"
        again["it"].zero_()  # and may be changed
    elif isinstance(sample, numpy.ndarray):
        assert again["it"].dtype == sample.dtype
        assert again["it"].shape == sample.shape
        assert again["it"].flags.f_contiguous == sample.flags.f_contiguous
        assert (again["it"] == sample).all()
    else:
        assert again["it"] == sample


@pytest.mark.parametrize(
    "sample",
    [object(), Path("a"), torch.ones(2, requires_grad=True), numpy.array([None]),
     torch.nn.Parameter(torch.ones(1)), torch.eye(2).to_sparse(), numpy.ma.array([1]),
     # What NumPy would give back otherwise.
     numpy.str_(""), numpy.bytes_(b""), numpy.bytes_(b"a\0"), numpy.str_("a\0"), numpy.zeros(2, "V0"),
     numpy.zeros(2).view(numpy.matrix), numpy.zeros(2, "f4").view(numpy.recarray)],
    ids=lambda sample: f"{type(sample).__name__} {getattr(sample, 'dtype', '')}",
)  # fmt: skip
def test_what_would_not_come_back_exactly_is_refused(sample: Any) -> None:
    with pytest.raises(NotEncodable):
        encode([sample])
    with pytest.raises(NotEncodable):
        encode({"it": sample})


VIEWS = {
    "conjugate": torch.tensor([[1 + 2j, 3 - 4j]]).conj(),
    "transposed": torch.tensor([[1 + 2j, 3 - 4j], [5j, 6.0]]).mH,
    "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_torch_has_not_worked_out_yet_comes_back(name: str) -> None:
    given = VIEWS[name]
    assert given.is_conj() or given.is_neg()
    again = decode(encode(given))
    assert not again.is_conj()
    assert not again.is_neg()
    assert again.dtype == given.dtype
    assert torch.equal(again, given)


@pytest.mark.parametrize("given", [numpy.str_("a"), numpy.bytes_(b"ab"), numpy.datetime64("2026-01-01")], ids=str)
def test_scalars_of_numpy_come_back_by_type(given: Any) -> None:
    again = decode(encode(given))
    assert type(again) is type(given)
    assert again == given
