from hypothesis import given
from hypothesis import strategies as st

from quorate.core.digests import derive_seed

labels = st.lists(st.integers(0, 2**40) | st.text(max_size=8).filter(lambda text: "/" not in text), max_size=4)


@given(st.integers(0, 2**63 - 1), labels)
def test_a_seed_is_a_fact_of_its_labels_and_fits_63_bits(seed: int, names: list[int | str]) -> None:
    derived = derive_seed(seed, *names)
    assert derived == derive_seed(seed, *names)
    assert 0 <= derived < 2**63


@given(labels, labels)
def test_other_labels_give_another_seed(left: list[int | str], right: list[int | str]) -> None:
    assert (derive_seed(0, *left) == derive_seed(0, *right)) == (left == right)


def test_seeds_that_add_up_to_the_same_do_not_meet() -> None:
    assert derive_seed(1, "lane", 2, 0) != derive_seed(2, "lane", 1, 0)
    assert derive_seed(0, "lane", 1, 12) != derive_seed(0, "lane", 11, 2)
    assert derive_seed(0, 1) != derive_seed(0, "1")
