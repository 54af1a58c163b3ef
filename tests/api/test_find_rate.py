"""What a learning-rate range test makes of its losses."""

import math
from typing import Any

import pytest

from quorate.api.find_rate import _rate_param, divergence, smooth, suggestions
from quorate.core.errors import RequestError

RATES = [10 ** (-6 + step / 10) for step in range(80)]


def bowl(rate: float) -> float:
    """Flat, down to a minimum at 0.1 with the steepest descent at 0.01, and up again."""
    place = math.log10(rate)
    return 2 - 1 / (1 + math.exp(-4 * (place + 2))) + max(0.0, place + 1) ** 2


def test_the_steepest_descent_and_a_tenth_of_the_minimum_are_suggested() -> None:
    values = [bowl(rate) for rate in RATES]
    steepest, tenth = suggestions(RATES, values)
    assert steepest == pytest.approx(0.01)
    assert tenth == pytest.approx(RATES[values.index(min(values))] / 10)


@pytest.mark.parametrize("values", [[], [1.0], [1.0 + step for step in range(80)]], ids=["none", "one", "rising"])
def test_without_a_descent_there_is_no_suggestion(values: list[float]) -> None:
    assert suggestions(RATES[: len(values)], values) == (None, None)


def test_a_smoothed_loss_is_a_mean_of_what_was_seen() -> None:
    assert smooth([3.0, 3.0, 3.0]) == [pytest.approx(3.0)] * 3
    assert smooth([1.0, 2.0])[1] == pytest.approx(1.505, abs=0.001)


@pytest.mark.parametrize(
    ("values", "after"), [([2.0, 1.0, 3.9], None), ([2.0, 1.0, 4.1, 0.5], 2), ([2.0, math.nan], 1), ([math.inf], 0)]
)
def test_it_diverges_at_four_times_the_least_or_where_it_is_no_number(values: list[float], after: int | None) -> None:
    assert divergence(values) == after


FIELDS: dict[str, Any] = {"width": (int, 8), "lr": (float, 0.1), "backbone_lr": (float, 0.01), "name": (str, "x")}


def test_the_rate_is_found_by_its_name() -> None:
    assert _rate_param("Task", FIELDS, {}, None) == "lr"
    assert _rate_param("Task", FIELDS, {}, "backbone_lr") == "backbone_lr"
    assert _rate_param("Task", {"learning_rate": (float, ...)}, {"learning_rate": 0.1}, None) == "learning_rate"
    with pytest.raises(RequestError, match="several learning rates: head_lr, backbone_lr"):
        _rate_param("Task", {"head_lr": (float, 0.1), "backbone_lr": (float, 0.1)}, {}, None)
    with pytest.raises(RequestError, match="no such number among its params; its numbers are width, lr, backbone_lr"):
        _rate_param("Task", FIELDS, {}, "name")
    with pytest.raises(RequestError, match="no param that is a learning rate"):
        _rate_param("Task", {"width": (int, 8)}, {}, None)
