import logging
from typing import Any

import pytest

from quorate.core.errors import RunError
from quorate.data.fingerprint import Fingerprint
from quorate.worker.same_data import LAYOUT, SAMPLES, check_same_data, data_facts

FACTS = {"torch": "2.13.0", "task source": "5e", **data_facts(Fingerprint("aa", "bb"))}
UNREAD = "cc (sample 0 of the training set cannot be read)"


def check(recorded: dict[str, Any], present: dict[str, str] | None = None, *, is_branch: bool = False) -> None:
    check_same_data("tiny-0001", recorded, FACTS | (present or {}), is_branch=is_branch)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("fact", "value"), [(LAYOUT, "aa"), (SAMPLES, "bb")])
def test_other_data_are_refused_with_both_values_and_the_remedy(fact: str, value: str) -> None:
    with pytest.raises(RunError, match="--branch") as told:
        check(FACTS | {fact: "00"})
    assert f"the data have changed since run tiny-0001 was saved ({fact} 00 then, {value} now)" in told.value.message


@pytest.mark.parametrize("recorded", [FACTS, FACTS | {"torch": "2.12.0"}, {}, {"torch": "2.13.0"}])
def test_the_same_data_and_what_was_not_recorded_pass(
    recorded: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check(recorded)
    assert warnings(caplog) == []


def test_a_branch_may_have_other_data_and_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    check(FACTS | {LAYOUT: "00"}, is_branch=True)
    [told] = warnings(caplog)
    assert "dataset layout 00 then, aa now" in told


def test_samples_may_be_other_numbers_by_another_library(caplog: pytest.LogCaptureFixture) -> None:
    check(FACTS | {SAMPLES: "00", "torch": "2.12.0"})
    [told] = warnings(caplog)
    assert "dataset 00 then, bb now" in told
    assert "torch: 2.12.0 then, 2.13.0 now" in told


def test_the_layout_is_the_same_by_any_library() -> None:
    with pytest.raises(RunError, match="dataset layout"):
        check(FACTS | {LAYOUT: "00", "torch": "2.12.0"})


@pytest.mark.parametrize(("then", "now"), [(UNREAD, "bb"), ("bb", UNREAD)])
def test_a_sample_that_was_mended_or_broken_since_is_no_other_dataset(then: str, now: str) -> None:
    """A job that ended by a bad sample is mended by restoring it; and another bad one is named when it is read."""
    check(FACTS | {SAMPLES: then}, {SAMPLES: now})


def test_an_earlier_format_compares_what_it_has() -> None:
    """Format 1 has no layout."""
    format_1 = {name: value for name, value in FACTS.items() if name != LAYOUT}
    check(format_1)
    with pytest.raises(RunError):
        check(format_1 | {SAMPLES: "00"})
