import numpy
import pytest

from quorate.data.indices import Ranges, count_in, numbers_in, ranges_of, union


@pytest.mark.parametrize(
    ("numbers", "ranges"),
    [
        ((), ()),
        ((7,), ((7, 7),)),
        ((3, 1, 2, 9), ((1, 3), (9, 9))),
        ((5, 5, 6), ((5, 5), (5, 6))),
        ((6, 5, 6, 5, 5), ((5, 5), (5, 5), (5, 6), (6, 6))),
    ],
)
def test_each_number_is_in_them_as_often_as_it_occurs(numbers: tuple[int, ...], ranges: Ranges) -> None:
    assert ranges_of(numbers) == ranges
    assert numbers_in(ranges).tolist() == sorted(numbers)
    assert count_in(ranges) == len(numbers)


def test_any_numbers_come_back() -> None:
    numbers = numpy.random.default_rng(4).integers(0, 400, 300)
    ranges = ranges_of(numbers)
    assert len(ranges) < len(numbers)
    assert numbers_in(ranges).tolist() == sorted(numbers.tolist())


def test_a_union_has_each_number_once_and_writes_none_out() -> None:
    assert union([(4, 6), (1, 2), (3, 3), (5, 9), (20, 2**62)]) == ((1, 9), (20, 2**62))
    assert union([(1, 9), (2, 3)]) == ((1, 9),)
    assert union([]) == ()
