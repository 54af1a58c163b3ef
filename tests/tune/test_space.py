"""What trials draw: by seed, number and key alone, inside their ranges, and grids without a gap."""

import subprocess
import sys
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from quorate.tune.spec import DimensionSpec, GridSpec, SearchSpec

SPACE = {
    "params.rate": DimensionSpec(loguniform=[1e-5, 1e-1]),
    "params.drop": DimensionSpec(uniform=[0.0, 0.5]),
    "params.width": DimensionSpec(choice=[16, 32, 64]),
    "batch_size": DimensionSpec(randint=[32, 256], step=32),
    "params.bend": DimensionSpec(uniform=[0.5, 2.5], step=0.5),
}


def sample(space: dict[str, DimensionSpec], seed: int, trial: int) -> dict[str, Any]:
    return SearchSpec(space=space, seed=seed).params(trial)


def test_another_process_draws_the_same_trials_in_another_order() -> None:
    given = {key: dimension.model_dump() for key, dimension in SPACE.items()}
    script = (
        "from quorate.tune.spec import DimensionSpec, SearchSpec\n"
        f"space = {{key: DimensionSpec(**keys) for key, keys in {given!r}.items()}}\n"
        "print([SearchSpec(space=space, seed=7).params(trial) for trial in reversed(range(1, 6))])"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.strip() == repr([sample(SPACE, 7, trial) for trial in reversed(range(1, 6))])


def test_a_key_that_is_added_changes_nothing_in_the_others() -> None:
    fewer = {key: SPACE[key] for key in ("params.rate", "batch_size")}
    for trial in (1, 2, 3):
        drawn = sample(SPACE, 7, trial)
        assert sample(fewer, 7, trial) == {key: drawn[key] for key in fewer}


def test_seeds_and_trials_draw_differently() -> None:
    drawn = {str(sample(SPACE, seed, trial)) for seed in (0, 1) for trial in range(1, 51)}
    assert len(drawn) == 100


@drawn_from(st.integers(0, 2**63 - 1), st.integers(1, 10_000))
def test_every_value_is_one_of_its_range(seed: int, trial: int) -> None:
    drawn = sample(SPACE, seed, trial)
    assert list(drawn) == list(SPACE)
    assert 1e-5 <= drawn["params.rate"] <= 1e-1
    assert 0 <= drawn["params.drop"] <= 0.5
    for key in ("params.width", "batch_size", "params.bend"):
        assert drawn[key] in (SPACE[key].values or [])
        assert type(drawn[key]) is type((SPACE[key].values or [])[0])


@drawn_from(st.floats(1e-12, 1e12), st.floats(1.001, 1e6), st.integers(0, 2**40), st.booleans())
def test_a_range_of_any_size_is_kept(low: float, ratio: float, seed: int, is_log: bool) -> None:
    ends = [low, low * ratio]
    dimension = DimensionSpec(loguniform=ends) if is_log else DimensionSpec(uniform=ends)
    assert low <= sample({"x": dimension}, seed, 1)["x"] <= low * ratio


def test_all_values_are_drawn_about_equally_often() -> None:
    trials = [sample(SPACE, 3, trial) for trial in range(1, 2001)]
    assert set(Counter(trial["batch_size"] for trial in trials)) == set(range(32, 257, 32))
    for key, share in (("params.width", 1 / 3), ("batch_size", 1 / 8), ("params.bend", 1 / 5)):
        for count in Counter(trial[key] for trial in trials).values():
            assert count == pytest.approx(2000 * share, rel=0.3)
    below = sum(trial["params.rate"] < 1e-3 for trial in trials)
    assert below == pytest.approx(1000, rel=0.1)


def test_logarithmic_steps_stay_on_their_steps() -> None:
    dimension = DimensionSpec(loguniform=[10, 1000], step=10)
    drawn = {sample({"x": dimension}, 0, trial)["x"] for trial in range(1, 500)}
    assert drawn <= {10.0 * number for number in range(1, 101)}
    assert 10.0 in drawn and max(drawn) > 500


def test_a_grid_has_every_combination_once_the_last_key_first() -> None:
    space = {"a": DimensionSpec(choice=["x", "y"]), "b": DimensionSpec(uniform=[0, 0.5], step=0.25)}
    spec = SearchSpec(space=space, algorithm=GridSpec(kind="grid"))
    assert spec.trials == spec.grid_size == 6
    combinations = [tuple(spec.params(trial).values()) for trial in range(1, 7)]
    assert combinations == list(product(["x", "y"], [0.0, 0.25, 0.5]))


def test_a_grid_is_repeated_with_other_draws_beside_it() -> None:
    space = {"a": DimensionSpec(grid=[1, 2]), "b": DimensionSpec(uniform=[0, 1]), "c": DimensionSpec(grid=[None, "z"])}
    assert SearchSpec(space=space).grid_size == 4
    trials = [sample(space, 0, trial) for trial in range(1, 9)]
    assert [(trial["a"], trial["c"]) for trial in trials] == [(1, None), (1, "z"), (2, None), (2, "z")] * 2
    assert len({trial["b"] for trial in trials}) == 8


def test_a_range_without_steps_has_no_end_of_values() -> None:
    assert DimensionSpec(uniform=[0, 1]).values is None
    space = {"a": DimensionSpec(loguniform=[1, 2])}
    assert SearchSpec(space=space, algorithm=GridSpec(kind="grid")).dimensions == space
    assert DimensionSpec(randint=[3, 6]).values == [3, 4, 5, 6]
