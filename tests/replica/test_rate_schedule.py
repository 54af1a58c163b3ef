import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lr

import gang
from bits.bit_tasks import Regression
from quorate.data.sampler import LaneSampler
from quorate.replica.rate_schedule import factor_at, notice_of_pace, rate_factor
from quorate.spec.job import ScheduleSpec

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


def sampler(steps_per_epoch: int = 234, epochs: int = 10) -> LaneSampler:
    spec = gang.job(Regression, lanes=1, batch_size=1, epochs=epochs)
    return LaneSampler(spec, steps_per_epoch, lambda _epoch, _generator: None)


def test_a_schedule_that_counts_epochs_is_the_same_for_all_steps_of_one() -> None:
    given, order = schedule("linear", per="epoch", warmup=1, final=0.5), sampler(3, 5)
    factors = [factor_at(given, step, order) for step in range(1, 16)]
    assert factors == [rate_factor(given, epoch, 5) for epoch in range(1, 6) for _ in range(3)]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


BY_EPOCH: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr.StepLR(o, step_size=1),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, milestones=[100, 150]),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=10),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, total_iters=10),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, gamma=0.95),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.95),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.95**epoch),
    "LambdaLR of a list": lambda o: lr.LambdaLR(o, [1.0, 0.5, 0.25].__getitem__),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.StepLR(o, 10)], [5]),
}
BY_STEP: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr.StepLR(o, step_size=1_000),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, max_lr=1.0, total_steps=2340),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, T_max=2340),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 1 - step / 2340),
    "a warm-up": lambda o: lr.LinearLR(o, total_iters=100),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, 2240)], [100]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o),
}


@pytest.mark.parametrize("make", BY_EPOCH.values(), ids=BY_EPOCH)
def test_a_schedule_that_looks_as_if_it_counts_epochs_is_noticed(make: Callable[..., Any]) -> None:
    scheduler = make(sgd())
    notice = notice_of_pace(None, [scheduler], sampler())
    assert notice is not None
    assert "234 times an epoch" in notice and "schedule: {per: epoch}" in notice and type(scheduler).__name__ in notice
    for per in ("step", "epoch"):
        assert notice_of_pace(ScheduleSpec.model_validate({"per": per}), [scheduler], sampler()) is None
    assert notice_of_pace(None, [scheduler], sampler(epochs=1)) is None
    assert notice_of_pace(None, [scheduler], sampler(1)) is None


@pytest.mark.parametrize("make", BY_STEP.values(), ids=BY_STEP)
def test_a_schedule_that_counts_updates_is_not(make: Callable[..., Any]) -> None:
    assert notice_of_pace(None, [make(sgd())], sampler()) is None
