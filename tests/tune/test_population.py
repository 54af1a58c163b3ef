"""Who goes on from whose checkpoint in a population, and with which params."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.tune.selection import decide
from quorate.tune.spec import PbtSpec, SearchSpec

SPACE = {"params.rate": {"loguniform": [0.001, 1.0]}, "params.width": {"choice": [2, 4, 8]}}


def search(mode: str = "max", seed: int = 0, **rule: Any) -> tuple[SearchSpec, PbtSpec]:
    spec = SearchSpec.model_validate(
        {"metric": "accuracy", "mode": mode, "space": SPACE, "seed": seed, "scheduler": {"kind": "pbt", **rule}}
    )
    assert isinstance(spec.scheduler, PbtSpec)
    return spec, spec.scheduler


def params_of(trials: Any) -> dict[int, dict[str, Any]]:
    return {trial: {"params.rate": 0.01 * trial, "params.width": 4} for trial in trials}


@pytest.mark.parametrize(("mode", "worst", "best"), [("max", 1, 4), ("min", 4, 1)])
def test_the_worst_goes_on_from_the_best(mode: str, worst: int, best: int) -> None:
    values = {1: 0.1, 2: 0.5, 3: 0.6, 4: 0.9}
    (exploit,) = decide(*search(mode), 100, values, params_of(values))
    assert (exploit.trial, exploit.donor) == (worst, best)
    assert f"trial {best}" in exploit.reason and "step 100" in exploit.reason


def test_what_is_not_a_number_is_worst_and_nobody_goes_on_from_it() -> None:
    values = {1: math.nan, 2: None, 3: 0.2, 4: 0.3}
    exploits = decide(*search(quantile=0.5), 10, values, params_of(values))
    assert {exploit.trial for exploit in exploits} == {1, 2}
    assert {exploit.donor for exploit in exploits} <= {3, 4}


def test_of_equals_nobody_gives_up_its_state() -> None:
    values = dict.fromkeys(range(1, 9), 0.5)
    assert decide(*search(), 10, values, params_of(values)) == []


def test_without_resampling_params_move_to_a_neighbour() -> None:
    values = {1: 0.1, 2: 0.9}
    seen = set()
    for step in range(10, 400, 10):
        (exploit,) = decide(*search(resample=0, quantile=0.5), step, values, params_of(values))
        assert exploit.params["params.rate"] in (pytest.approx(0.016), pytest.approx(0.024))
        seen.add(exploit.params["params.width"])
    assert seen == {2, 8}


@given(
    values=st.dictionaries(st.integers(1, 20), st.floats(-1, 1), min_size=1),
    seed=st.integers(0, 9),
    quantile=st.floats(0.05, 0.5),
    resample=st.floats(0, 1),
)
def test_it_is_decided_by_values_and_seed_alone(
    values: dict[int, float], seed: int, quantile: float, resample: float
) -> None:
    spec, rule = search(seed=seed, quantile=quantile, resample=resample)
    exploits = decide(spec, rule, 10, values, params_of(values))
    turned = dict(reversed(values.items()))
    assert exploits == decide(spec, rule, 10, turned, params_of(turned))
    assert len({exploit.trial for exploit in exploits}) == len(exploits) <= len(values) // 2
    for exploit in exploits:
        assert values[exploit.donor] > values[exploit.trial]
        assert 0.001 <= exploit.params["params.rate"] <= 1 and exploit.params["params.width"] in (2, 4, 8)
