"""What computes otherwise than when a run was saved is told where it goes on."""

import pytest

from quorate.worker.restore import device_changes

THEN = {"python": "3.11", "device": "cuda", "gpu": "NVIDIA H200", "cudnn": "91900", "compiled": "loss"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"python": "3.12"}, []),  # by the launcher
        ({"attention": "torch"}, []),  # nobody knows what it was
        ({"compiled": "no"}, ["compiled was loss when run tiny-1 was saved and is no now: the bits may differ"]),
        (
            {"gpu": "NVIDIA A100", "cudnn": "90100"},
            [
                "gpu was NVIDIA H200 when run tiny-1 was saved and is NVIDIA A100 now: the bits may differ",
                "cudnn was 91900 when run tiny-1 was saved and is 90100 now: the bits may differ",
            ],
        ),
    ],
)
def test_what_has_changed_is_told(changes: dict[str, str], told: list[str]) -> None:
    assert device_changes("tiny-1", THEN, THEN | changes) == told
