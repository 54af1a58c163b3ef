"""Which trials a search proposes, after whatever it knows: the same wherever they run."""

from pathlib import Path
from typing import Any

import pytest

from quorate.tune.driver import TrialSource
from quorate.tune.loading import load_recorded_search
from quorate.tune.spec import SearchSpec
from quorate.tune.trials import Journal
from tune.search_builder import search_folder


def prepared(tmp_path: Path, **keys: Any) -> tuple[SearchSpec, Journal]:
    teller = search_folder(tmp_path, **keys)
    return load_recorded_search(teller.folder.path).spec, Journal(teller.folder)


def given_by(source: TrialSource) -> dict[int, dict[str, Any]]:
    """One trial after the other, each done before the next is proposed."""
    found = {}
    while source.has_more:
        number, params = source.next()
        found[number] = params
        source.ended(number)
    return found


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_trials_are_numbered_in_order_of_proposal_and_end_with_the_budget(tmp_path: Path, engine: str) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 3}, engine=engine)
    assert given_by(TrialSource(spec, journal)) == {number: spec.params(number) for number in (1, 2, 3)}
    assert sorted(journal.trials) == [1, 2, 3]


def test_a_resumed_search_proposes_what_is_unfinished_first_with_the_same_params(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, budget={"trials": 4})
    teller.tell("search-began").begin(1).finish(1).begin(2).report(2, 0.5).begin(3, batch_size=16)
    spec = load_recorded_search(teller.folder.path).spec
    given = given_by(TrialSource(spec, Journal(teller.folder)))
    assert list(given) == [2, 3, 4]
    assert given[3]["batch_size"] == 16


def test_a_trial_whose_process_has_died_is_given_again_before_others(tmp_path: Path) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 2})
    source = TrialSource(spec, journal)
    first = source.next()
    source.again(1)
    assert source.next() == first
    assert source.next()[0] == 2
    source.again(2)
    source.is_over = True
    assert not source.has_more


@pytest.mark.parametrize("metric", ["loss", ["loss", "accuracy"]])
def test_optuna_is_told_what_earlier_parts_of_the_search_have_found(tmp_path: Path, metric: Any) -> None:
    keys: dict[str, Any] = {"algorithm": {"kind": "optuna", "startup_trials": 2}, "budget": {"trials": 12}}
    mode = "min" if isinstance(metric, str) else ["min", "max"]
    teller = search_folder(tmp_path, metric=metric, mode=mode, **keys)
    teller.tell("search-began")
    for number in range(1, 11):  # the lower the rate, the better
        rate = 10.0 ** (-4 + 0.4 * (number - 1))
        params = {"params.learning_rate": rate, "params.kind": "sgd" if number % 2 else "adam", "batch_size": 8}
        teller.tell("proposed", number, params=params).tell("began", number, run=f"trial-{number:04d}")
        metrics = {"loss": rate, "accuracy": 1 - rate}
        teller.tell("reported", number, step=20, metrics=metrics, best=True)
        teller.tell("finished", number, step=100, metrics=metrics, seconds=1.0, digest="")
    spec = load_recorded_search(teller.folder.path).spec
    # The second knows the proposal of the first, and repeats it.
    given = [TrialSource(spec, Journal(teller.folder)).next() for _ in range(2)]
    assert given[0] == given[1]
    number, params = given[0]
    assert number == 11
    assert 1e-4 <= params["params.learning_rate"] < 0.1
    assert params["params.kind"] in ("sgd", "adam")
    assert params["batch_size"] in range(8, 65, 8)
