import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.spec.job import ScheduleSpec
from quorate.training.optimizers import rate_factor

KINDS = ["constant", "linear", "cosine"]


def schedule(kind: str, **keys: Any) -> ScheduleSpec:
    return ScheduleSpec.model_validate({"kind": kind, **keys})


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_up_rises_evenly_to_the_base_rate(kind: str) -> None:
    given = schedule(kind, warmup=4)
    assert [rate_factor(given, step, 10) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_final_rate_would_be_that_of_the_step_after_the_last(kind: str, final: float) -> None:
    given = schedule(kind, warmup=2, final=final)
    assert rate_factor(given, 3, 12) == 1.0
    assert rate_factor(given, 12, 12) > final
    assert rate_factor(given, 13, 12) == pytest.approx(final)


def test_half_way_linear_and_cosine_meet() -> None:
    for kind in ("linear", "cosine"):
        assert rate_factor(schedule(kind, warmup=2, final=0.2), 8, 12) == pytest.approx(0.6)
    quarter = rate_factor(schedule("cosine"), 4, 12)
    assert quarter == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert rate_factor(schedule("linear"), 4, 12) == pytest.approx(0.75)


def test_constant_stays() -> None:
    assert {rate_factor(schedule("constant", warmup=1), step, 9) for step in range(1, 10)} == {1.0}


@given(
    st.sampled_from(KINDS),
    st.integers(0, 30),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_factors_stay_between_zero_and_one_and_fall_after_the_warm_up(
    kind: str, warmup: int, final: float, total: int
) -> None:
    factors = [rate_factor(schedule(kind, warmup=warmup, final=final), step, total) for step in range(1, total + 1)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert all(after <= before + 1e-12 for before, after in pairwise(falling))
    assert all(factor >= final - 1e-12 for factor in falling)
    assert all(factor > 0 for factor in rising)


def test_steps_past_the_end_keep_the_final_rate() -> None:
    assert rate_factor(schedule("cosine", final=0.1), 30, 12) == pytest.approx(0.1)
