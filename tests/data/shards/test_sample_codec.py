"""Samples as bytes: what comes back is what was given, or it is refused."""

from typing import Any

import numpy
import pytest
import torch

from quorate.shards.decoded_cache import NotEncodable, decode, encode

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


@pytest.mark.parametrize(
    "given",
    [numpy.str_(""), numpy.bytes_(b""), numpy.bytes_(b"a\0"), numpy.str_("a\0"), numpy.zeros(2, "V0"),
     numpy.zeros(2).view(numpy.matrix), numpy.zeros(2, "f4").view(numpy.recarray)],
    ids=lambda given: f"{type(given).__name__} {given.dtype}",
)  # fmt: skip
def test_what_numpy_would_give_back_otherwise_is_refused(given: Any) -> None:
    with pytest.raises(NotEncodable):
        encode({"it": given})


@pytest.mark.parametrize("given", [numpy.str_("a"), numpy.bytes_(b"ab"), numpy.datetime64("2026-01-01")], ids=str)
def test_scalars_of_numpy_come_back_by_type(given: Any) -> None:
    again = decode(encode(given))
    assert type(again) is type(given)
    assert again == given
