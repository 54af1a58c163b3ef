"""`batch_size: auto`: the largest batch that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.training.batch_search import largest_that_fits


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_the_largest_that_fits_is_found_to_an_eighth(room: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= most
        tried.append(size)
        return size <= room

    found = largest_that_fits(fits, most)
    assert found <= min(room, most)
    assert (found == 0) == (room == 0)
    assert found == most or found + max(1, found // 8) >= room
    assert len(tried) <= 20


@pytest.mark.parametrize(("most", "first"), [(1, 1), (2, 2), (100, 2)])
def test_batch_norm_is_not_given_a_single_sample_first(most: int, first: int) -> None:
    tried: list[int] = []
    largest_that_fits(lambda size: tried.append(size) or True, most)  # type: ignore[func-returns-value]
    assert tried[0] == first
