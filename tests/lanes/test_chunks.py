import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.lanes.chunks import cut


@given(length=st.integers(0, 1000), parts=st.integers(1, 40))
def test_slices_tile_the_length_evenly(length: int, parts: int) -> None:
    slices = cut(length, parts)
    items = list(range(length))
    sizes = [len(items[part]) for part in slices]
    assert [item for part in slices for item in items[part]] == items
    assert len(slices) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_what_is_too_short_leaves_the_last_parts_empty() -> None:
    assert cut(2, 4) == (slice(0, 1), slice(1, 2), slice(2, 2), slice(2, 2))


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0)])
def test_an_impossible_cut_is_refused_with_both_numbers(length: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"length of {length} cannot be cut into {parts} parts"):
        cut(length, parts)
