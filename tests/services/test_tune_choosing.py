"""How Ray is asked for the trials of a search, and what its schedulers make of their evaluations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.dict import flatten_dict
from ray.tune import TuneError
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from quorate.core.errors import RequestError, RunError
from quorate.tune.driver import TrialSource
from quorate.tune.loading import load_recorded_search
from quorate.tune.ray_search import own_error
from quorate.tune.ray_tune import Pruned, RaySearcher, result_of
from quorate.tune.result import SearchResult
from quorate.tune.search import MlflowParent, run_search
from quorate.tune.spec import SearchSpec
from quorate.tune.trial_run import Report
from quorate.tune.trials import Journal
from tune.search_builder import search_folder


def prepared(tmp_path: Path, **keys: Any) -> tuple[SearchSpec, Journal]:
    teller = search_folder(tmp_path, **keys)
    return load_recorded_search(teller.folder.path).spec, Journal(teller.folder)


def test_no_more_run_at_once_than_asked_for_and_a_paused_one_leaves_its_place(tmp_path: Path) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 9})
    searcher = RaySearcher(TrialSource(spec, journal), 2)
    assert searcher.suggest("a") and searcher.suggest("b")
    assert searcher.suggest("c") is None
    searcher.pause("a")
    assert searcher.suggest("c")["trial"] == 3
    assert searcher.suggest("d") is None
    searcher.on_trial_complete("b")
    assert searcher.suggest("d")["trial"] == 4


def test_the_end_of_proposals_ends_actors_but_not_of_trials_that_pause(tmp_path: Path) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 1})
    searcher = RaySearcher(TrialSource(spec, journal), None)
    assert searcher.suggest("a") == {"trial": 1, "params": spec.params(1)}
    searcher.pause("a")
    assert searcher.suggest("b") is None
    searcher.on_trial_complete("a")
    assert searcher.suggest("b") == Searcher.FINISHED


def test_a_scheduler_stops_with_a_reason_and_counts_what_was_told_before(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric="loss", mode="min", scheduler={"kind": "asha", "reduction": 2})
    teller.tell("search-began").begin(1).report(1, 0.9, 0.4).finish(1).begin(2).report(2, 0.5, 0.2).finish(2)
    pruned = Pruned(load_recorded_search(teller.folder.path).spec, Journal(teller.folder))
    trial = SimpleNamespace(trial_id="x", config={"trial": 3})

    def told(step: int, loss: float) -> str:
        """As Tune gives it to a scheduler: flat."""
        result = result_of(Report(step, {"loss": loss}, 100))
        return str(pruned.on_trial_result(None, trial, flatten_dict(result)))

    assert told(20, 0.45) == TrialScheduler.CONTINUE
    assert told(40, 0.35) == TrialScheduler.STOP
    assert pruned.reasons["x"] == "asha: loss 0.3500 at step 40 is not among the best 1/2 there"


@pytest.mark.parametrize("address", ["local", "127.0.0.1:1"])
def test_a_ray_that_is_not_there_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nAnd so on")

    told_to_mlflow: list[SearchResult] = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(MlflowParent, "end", lambda _, record: told_to_mlflow.append(record))
    folder = search_folder(tmp_path, engine="ray", address=address).folder
    with pytest.raises(RequestError) as refused:
        run_search(load_recorded_search(folder.path), folder, None, lambda: None)
    told = "cannot be started on this machine (The current node timed out during startup)"
    assert (told if address == "local" else "there is no Ray cluster at 127.0.0.1:1") in refused.value.message
    assert refused.value.message.startswith("address: ") and "engine" not in refused.value.message
    assert told_to_mlflow, "its run there would be under way for ever"


def test_what_tune_makes_of_an_error_is_told_as_what_it_was() -> None:
    try:
        try:
            raise RunError("cannot write the log")
        except RunError:
            raise TuneError("Traceback (most recent call last)")  # noqa: B904 (as Tune does it)
    except TuneError as error:
        assert str(own_error(error)) == "cannot write the log"
    foreign = ValueError("of Ray")
    assert own_error(foreign) is foreign
