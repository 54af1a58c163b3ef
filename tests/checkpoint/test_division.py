from hypothesis import given
from hypothesis import strategies as st

from quorate.checkpoint.division import divide

SIZES = st.dictionaries(st.text(max_size=5), st.integers(0, 10**9), max_size=40)


@given(SIZES, st.integers(1, 12))
def test_every_tensor_is_in_one_part_and_the_parts_are_balanced(sizes: dict[str, int], writers: int) -> None:
    parts = divide(sizes, writers)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    assert len(parts) == max(1, min(writers, len(sizes)))
    if sizes:
        assert all(parts), "nobody writes an empty file"
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) - min(loads) <= max(sizes.values())


@given(SIZES, st.integers(1, 12), st.randoms())
def test_all_writers_come_to_the_same(sizes: dict[str, int], writers: int, random: object) -> None:
    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert divide({name: sizes[name] for name in names}, writers) == divide(sizes, writers)


def test_without_any_tensor_there_is_one_empty_part() -> None:
    assert divide({}, 3) == ((),)


def test_the_largest_is_alone_where_the_rest_is_smaller() -> None:
    assert divide({"large": 10, "a": 3, "b": 3, "c": 3}, 2) == (("large",), ("a", "b", "c"))
