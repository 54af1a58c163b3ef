import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.observe.quantities import ASCII_BLOCKS, BLOCKS, blocks_for, sparkline


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([3.0, 3.0, 3.0], 10, "▁▁▁"),
        ([0.0, 1.0], 10, "▁█"),
        ([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], 8, "█▇▆▅▄▃▂▁"),
        ([0.0, 0.0, 2.0, 2.0, 4.0, 4.0], 3, "▁▅█"),
        ([0.0, math.nan, 1.0], 3, "▁ █"),
        ([0.0, math.inf, 8.0, 8.0], 2, "▁█"),
        ([math.nan, math.nan], 2, "  "),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_curves(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_each_character_is_the_mean_of_its_share() -> None:
    assert sparkline([0, 10, 4, 6, 0, 0], 3) == "█" + "█" + "▁"


@given(st.lists(st.floats(), max_size=200), st.integers(0, 60))
def test_any_numbers_fit_any_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= {*BLOCKS, " "}


def test_numbers_as_far_apart_as_numbers_can_be() -> None:
    largest = sys.float_info.max
    assert sparkline([-largest, largest], 2) == "▁█"
    assert sparkline([largest, largest, 0.0, 0.0], 2) == "█▁"


def test_a_stream_without_blocks_gets_ascii() -> None:
    assert blocks_for("utf-8") == BLOCKS
    assert {blocks_for("ascii"), blocks_for("latin-1"), blocks_for("no such encoding")} == {ASCII_BLOCKS}
    assert sparkline([0.0, 1.0], 2, ASCII_BLOCKS) == "_#"
    assert len(ASCII_BLOCKS) == len(BLOCKS)
