"""What is measured of attention: whether it repeats, how long it takes, or why there is none."""

import torch

from benchmarks.own.attention import TINY, measured

CPU = torch.device("cpu")


def test_what_there_is_repeats_and_is_measured() -> None:
    told = measured("math", TINY[0], CPU, strict=True)
    assert told["repeats"]
    assert told["ms"] > 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_there_is_not_is_told_with_its_reason() -> None:
    assert "No viable backend" in measured("efficient", TINY[0], CPU, strict=True)["absent"]
