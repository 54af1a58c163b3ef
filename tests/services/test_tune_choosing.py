"""Which trials a search proposes, after whatever it knows, and what schedulers make of their evaluations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.tune import TuneError
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from history.search_builder import search_folder
from quorate.core.errors import RequestError, RunError
from quorate.history.search_record import SearchRecord
from quorate.spec.search import SearchSpec
from quorate.spec.search_load import load_recorded_search
from quorate.tune.journal import Journal
from quorate.tune.mlflow_parent import MlflowParent
from quorate.tune.ray_schedulers import Asha
from quorate.tune.ray_searcher import TrialSource
from quorate.tune.run_search import own_error, run_search


def prepared(tmp_path: Path, **keys: Any) -> tuple[SearchSpec, Journal]:
    teller = search_folder(tmp_path, **keys)
    return load_recorded_search(teller.folder.path).spec, Journal(teller.folder)


def suggestions(source: TrialSource, count: int) -> list[Any]:
    """One trial after the other, each done before the next is proposed."""
    found = []
    for number in range(count):
        found.append(source.suggest(f"t{number}"))
        source.on_trial_complete(f"t{number}")
    return found


def test_trials_are_numbered_in_order_of_proposal_and_end_with_the_budget(tmp_path: Path) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 3})
    given = suggestions(TrialSource(spec, journal, None, replay=False), 4)
    assert [each["trial"] for each in given[:3]] == [1, 2, 3]
    assert [each["params"] for each in given[:3]] == [spec.params(number) for number in (1, 2, 3)]
    assert given[3] == Searcher.FINISHED
    assert sorted(journal.trials) == [1, 2, 3]


def test_no_more_run_at_once_than_asked_for_and_a_paused_one_leaves_its_place(tmp_path: Path) -> None:
    spec, journal = prepared(tmp_path, budget={"trials": 9})
    source = TrialSource(spec, journal, 2, replay=False)
    assert source.suggest("a") and source.suggest("b")
    assert source.suggest("c") is None
    source.pause("a")
    assert source.suggest("c")["trial"] == 3
    assert source.suggest("d") is None
    source.on_trial_complete("b")
    assert source.suggest("d")["trial"] == 4


def test_a_resumed_search_proposes_what_is_unfinished_first_with_the_same_params(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, budget={"trials": 4})
    teller.tell("search-began").begin(1).finish(1).begin(2).report(2, 0.5).begin(3, batch_size=16)
    spec = load_recorded_search(teller.folder.path).spec
    given = suggestions(TrialSource(spec, Journal(teller.folder), None, replay=False), 4)
    assert [each["trial"] for each in given[:3]] == [2, 3, 4]
    assert given[1]["params"]["batch_size"] == 16
    assert given[3] == Searcher.FINISHED


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
    runs = [
        suggestions(TrialSource(spec, Journal(teller.folder), None, replay=False), 1)[0] for _ in range(2)
    ]  # the second knows the proposal of the first, and repeats it
    assert runs[0] == runs[1]
    assert runs[0]["trial"] == 11
    assert 1e-4 <= runs[0]["params"]["params.learning_rate"] < 0.1
    assert runs[0]["params"]["params.kind"] in ("sgd", "adam")
    assert runs[0]["params"]["batch_size"] in range(8, 65, 8)


def test_asha_stops_with_a_reason_and_counts_what_was_told_before(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric="loss", mode="min", scheduler={"kind": "asha", "reduction": 2})
    teller.tell("search-began").begin(1).report(1, 0.9, 0.4).finish(1).begin(2).report(2, 0.5, 0.2).finish(2)
    spec = load_recorded_search(teller.folder.path).spec
    asha = Asha(spec, Journal(teller.folder))
    trial = SimpleNamespace(trial_id="x")
    asha.on_trial_add(None, trial)

    def told(step: int, loss: float) -> str:
        return asha.on_trial_result(None, trial, {"step": step, "metrics/loss": loss, "total_steps": 100})

    assert told(20, 0.6) == TrialScheduler.CONTINUE
    assert told(40, 0.35) == TrialScheduler.STOP
    assert asha.reasons["x"] == "asha: 0.35 at step 40 is not among the best 1/2 there (cut 0.3)"
    last = SimpleNamespace(trial_id="y")
    asha.on_trial_add(None, last)
    at_its_end = {"step": 100, "metrics/loss": 9.0, "total_steps": 100}
    assert asha.on_trial_result(None, last, at_its_end) == TrialScheduler.CONTINUE
    assert asha.on_trial_result(None, last, {**at_its_end, "step": 20, "metrics/loss": float("nan")}) == "STOP"
    assert "not a number" in asha.reasons["y"]


@pytest.mark.parametrize("address", ["local", "127.0.0.1:1"])
def test_a_ray_that_is_not_there_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nAnd so on")

    told_to_mlflow: list[SearchRecord] = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(MlflowParent, "end", lambda _, record: told_to_mlflow.append(record))
    folder = search_folder(tmp_path, address=address).folder
    with pytest.raises(RequestError) as refused:
        run_search(load_recorded_search(folder.path), folder, None, lambda: None)
    told = "cannot be started on this machine (The current node timed out during startup)"
    assert (told if address == "local" else "there is no Ray cluster at 127.0.0.1:1") in refused.value.message
    assert refused.value.message.startswith("address: ") and "engine" not in refused.value.message
    assert told_to_mlflow, "its run there would be under way for ever"


def test_trials_of_another_search_in_the_storage_are_not_taken_for_its_own(tmp_path: Path) -> None:
    storage = tmp_path / "shared"
    first = search_folder(tmp_path / "one", storage=str(storage)).folder
    (storage / first.name / "trials" / "trial-0001").mkdir(parents=True)
    with pytest.raises(RunError, match="has the trials of another search"):
        run_search(load_recorded_search(first.path), first, None, lambda: None)
    assert first.trials.is_dir() and not first.trials.is_symlink()


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
