"""A tally sees every sample that is missing, repeated or another one, and nothing of how the rest was divided."""

import random
import sys
from itertools import combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.jobs import sampler
from quorate.data import ledger
from quorate.data.ledger import NOTHING, Tally, total

indices = st.integers(0, 2**40)
sets = st.lists(indices, min_size=1, max_size=40)
epochs = st.integers(0, 10**6)


@given(epochs, sets, st.randoms(use_true_random=False), st.integers(1, 5))
def test_order_and_division_do_not_matter(epoch: int, read: list[int], chance: random.Random, parts: int) -> None:
    shuffled = list(read)
    chance.shuffle(shuffled)
    tallies = [Tally.of(epoch, shuffled[part::parts]) for part in range(parts)]
    chance.shuffle(tallies)
    assert total(tallies) == Tally.of(epoch, read) == Tally.of(epoch, tuple(read))
    assert sum(tallies, NOTHING) == Tally.of(epoch, numpy.array(read, dtype=numpy.int64))


@given(epochs, sets, indices, st.data())
def test_a_sample_omitted_repeated_or_exchanged_is_seen(
    epoch: int, read: list[int], other: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(read) - 1))
    whole = Tally.of(epoch, read)
    assert Tally.of(epoch, read[:place] + read[place + 1 :]) != whole
    assert Tally.of(epoch, [*read, read[place]]) != whole
    assert (Tally.of(epoch, [*read[:place], other, *read[place + 1 :]]) == whole) is (other == read[place])


@given(epochs, epochs, sets)
def test_the_same_samples_in_another_epoch_are_others(epoch: int, other: int, read: list[int]) -> None:
    assert (Tally.of(epoch, read) == Tally.of(other, read)) is (epoch == other)


def test_two_samples_are_never_taken_for_two_others() -> None:
    """Also in each half by itself: 1 + 4 and 2 + 3 would have the same sum."""
    single = [Tally.of(0, [index]) for index in range(600)]
    pairs = [left + right for left, right in combinations(single, 2)]
    for words in ({tally.words[0] for tally in pairs}, {tally.words[1] for tally in pairs}):
        assert len(words) == len(pairs)


def test_equal_sums_and_equal_sums_of_squares_are_told_apart() -> None:
    assert {0, 4, 5} != {1, 2, 6}
    assert Tally.of(0, [0, 4, 5]).words[0] != Tally.of(0, [1, 2, 6]).words[0]
    assert Tally.of(0, [0, 4, 5]).words[1] != Tally.of(0, [1, 2, 6]).words[1]


@given(epochs, sets)
def test_it_is_written_as_32_digits_and_read_back(epoch: int, read: list[int]) -> None:
    tally = Tally.of(epoch, read)
    assert len(str(tally)) == 32
    assert Tally.from_hex(str(tally)) == tally
    assert str(NOTHING) == "0" * 32


@pytest.mark.parametrize("text", ["", "ab", "g" * 32, "0" * 33])
def test_what_is_no_tally_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tally|invalid literal"):
        Tally.from_hex(text)


def test_all_samples_and_a_whole_order_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Tally.of(3, range(25))
    assert Tally.of_order(3, range(25)) == whole
    monkeypatch.setattr(ledger, "_SLICE", 4)
    assert Tally.of_order(3, range(25)) == Tally.of_order(3, numpy.arange(25)[::-1].copy()) == whole
    assert Tally.of_order(3, range(0)) == Tally.of(3, ()) == NOTHING


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_the_steps_of_an_epoch_and_what_it_drops_make_up_the_training_set(last_batch: str) -> None:
    given = sampler(30, lanes=4, batch_size=7, epochs=2, last_batch=last_batch)
    for epoch in (0, 1):
        steps = range(epoch * given.steps_per_epoch + 1, (epoch + 1) * given.steps_per_epoch + 1)
        read = total(
            Tally.of(epoch, part) for step in steps for lane in range(4) for part in given.micro_batches(step, lane)
        )
        dropped = Tally.of(epoch, given.dropped(epoch))
        assert len(given.dropped(epoch)) == (2 if last_batch == "drop" else 0)
        assert read + dropped == Tally.of_order(epoch, range(given.samples))


def test_however_many_are_added_before_anybody_asks_the_sum_is_the_same() -> None:
    steps = [Tally.of(3, numpy.arange(start, start + 10)) for start in range(0, 2000, 10)]
    so_far = [NOTHING]
    for step in steps:
        so_far.append(so_far[-1] + step)
    assert so_far[-1] == Tally.of(3, range(2000)) == total(steps)
    assert [str(tally) for tally in so_far[1:3]] == [str(Tally.of(3, range(10))), str(Tally.of(3, range(20)))]


def test_a_tally_keeps_no_batch_alive() -> None:
    mapped = numpy.arange(1000, dtype=numpy.int64)  # the numbers of samples lie before their images, say
    read = mapped[:10]
    tally, expected = Tally.of(3, read), str(Tally.of(3, list(range(10))))
    before = sys.getrefcount(mapped)
    del read
    assert sys.getrefcount(mapped) == before - 1, "only the view has held it"
    mapped[:] = 0
    assert str(tally) == expected
