from typing import Any

import pytest

from quorate.core.errors import RunError
from quorate.data.fingerprint import LAYOUT, SAMPLES, Fingerprint
from quorate.worker.restore import check_same_data

FACTS = {"torch": "2.13.0", "task source": "5e", **Fingerprint("aa", "bb", {"Pillow": "13.0.0"}).facts}
UNREAD = "cc (sample 0 of the training set cannot be read)"
OLD = {"torch": "2.12.0", "library Pillow": "12.0.0"}


def check(
    recorded: dict[str, Any], present: dict[str, str] | None = None, *, of_shards: bool = False, is_branch: bool = False
) -> str | None:
    return check_same_data("tiny-0001", recorded, FACTS | (present or {}), of_shards=of_shards, is_branch=is_branch)


@pytest.mark.parametrize(("fact", "value"), [(LAYOUT, "aa"), (SAMPLES, "bb")])
@pytest.mark.parametrize("of_shards", [False, True])
def test_other_data_are_refused_with_both_values_and_the_remedy(fact: str, value: str, of_shards: bool) -> None:
    with pytest.raises(RunError, match="--branch") as told:
        check(FACTS | {fact: "00"}, of_shards=of_shards)
    assert f"the data have changed since run tiny-0001 was saved ({fact} 00 then, {value} now)" in told.value.message
    assert "where only their place is another" in told.value.message


def facts_of(layout: str, words: str) -> dict[str, str]:
    return FACTS | Fingerprint(layout, "bb", {}, words).facts


def test_what_the_data_were_and_are_is_said_in_words() -> None:
    then, now = (facts_of(f"{n}0", f"training set: {n} samples in 2 jsonl files, window 7") for n in (4, 5))
    with pytest.raises(RunError) as told:
        check(then, now)
    for words in ("40 (training set: 4 samples", "50 (training set: 5 samples"):
        assert words in told.value.message
    with pytest.raises(RunError, match=r"00 then, 50 now: training set: 5 samples .*files hold something else"):
        check(now | {LAYOUT: now[LAYOUT].replace("50", "00", 1)}, now)


def test_a_layout_without_words_is_that_of_an_earlier_version() -> None:
    assert check(FACTS, facts_of("aa", "training set: 4 samples")) is None
    with pytest.raises(RunError):
        check(FACTS | {LAYOUT: "00"}, facts_of("aa", "training set: 4 samples"))


@pytest.mark.parametrize("recorded", [FACTS, FACTS | OLD, {}, {"torch": "2.13.0"}])
@pytest.mark.parametrize("is_branch", [False, True])
def test_the_same_data_and_what_was_not_recorded_pass(recorded: dict[str, Any], is_branch: bool) -> None:
    assert check(recorded, is_branch=is_branch) is None


def test_a_branch_may_have_other_data_and_is_warned() -> None:
    assert "dataset layout 00 then, aa now" in (check(FACTS | {LAYOUT: "00"}, is_branch=True) or "")


@pytest.mark.parametrize("others", [{name: OLD[name]} for name in OLD] + [OLD], ids=str)
def test_samples_may_be_other_numbers_by_another_library(others: dict[str, str]) -> None:
    told = check(FACTS | {SAMPLES: "00"} | others) or ""
    assert "dataset 00 then, bb now" in told
    for name in OLD:
        assert (f"{name}: {OLD[name]} then, {FACTS[name]} now" in told) is (name in others)


def test_a_library_of_which_nothing_is_recorded_is_no_reason() -> None:
    recorded = {name: value for name, value in FACTS.items() if not name.startswith("library")}
    with pytest.raises(RunError):
        check(recorded | {SAMPLES: "00"})


def test_the_layout_is_the_same_by_any_library() -> None:
    with pytest.raises(RunError, match="dataset layout"):
        check(FACTS | {LAYOUT: "00"} | OLD)


@pytest.mark.parametrize(("then", "now"), [(UNREAD, "bb"), ("bb", UNREAD)])
def test_a_sample_that_was_mended_or_broken_since_is_no_other_dataset(then: str, now: str) -> None:
    """A job that ended by a bad sample is mended by restoring it; and another bad one is named when it is read."""
    assert check(FACTS | {SAMPLES: then}, {SAMPLES: now}) is None


def test_an_earlier_format_compares_what_it_has() -> None:
    """Without a layout; and of shards there was another digest then, which compares with none of now."""
    earlier = {name: value for name, value in FACTS.items() if name != LAYOUT}
    assert check(earlier) is None
    with pytest.raises(RunError):
        check(earlier | {SAMPLES: "00"})
    assert check(earlier | {SAMPLES: "00"}, of_shards=True) is None
