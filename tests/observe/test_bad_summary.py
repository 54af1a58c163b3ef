"""What the end of a job says of the samples that it has left out."""

import io

import pytest

from quorate.observe.screen import WARNING, Screen, print_summary


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            {"training": 657, "training_read": 1920, "validation": 0, "validation_read": 9},
            f"{WARNING}657 of 1,920 (34%)",
        ),
        ({"training": 10, "training_read": 1000, "validation": 0, "validation_read": 9}, "10 of 1,000 (1%)"),
        ({"training": 1, "training_read": 1000, "validation": 0, "validation_read": 9}, "1 of 1,000 (under 1%)"),
        (
            {"training": 1, "training_read": 1000, "validation": 3, "validation_read": 9},
            f"{WARNING}1 of 1,000 (under 1%) of the training set and 3 of 9 (33%) of the validation set",
        ),
    ],
)
def test_the_share_is_told_and_a_large_one_is_a_warning(bad: dict[str, int], told: str) -> None:
    stream = io.StringIO()
    print_summary({"run": "a-0001", "status": "complete", "bad_samples": bad}, Screen(stream))
    assert f"  bad samples  {told} left out; quorate show a-0001 --ledger lists them" in stream.getvalue()
