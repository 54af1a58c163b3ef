"""What `quorate.tune` returns: read from the folder of a search, with all that one asks of it afterwards."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import quorate
from quorate.core.errors import RunError
from quorate.tune import search
from quorate.tune.result import SearchResult, open_search
from quorate.tune.search import conclude
from tune.search_builder import add_run, search_folder, told_search


def test_the_best_with_its_params_metrics_and_job(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    add_run(teller, 2, {20: 0.8, 40: 0.4, 60: 0.3}, complete=True)
    result = conclude(teller.tell("search-ended", reason="complete").folder)
    best = result.best
    assert best is not None
    assert (result.status, result.exit_code, best.number, best.step) == ("complete", 0, 2, 60)
    assert best.metrics == {"loss": 0.3}
    assert best.params["params.kind"] == "adam"
    assert best.weights_digest == "02" * 32
    assert best.run.weights_digest == best.weights_digest
    assert isinstance(best.job, quorate.Job)
    assert best.job.spec.params == {"learning_rate": 0.01, "kind": "adam"}
    assert result.best_job.is_file()
    assert result.report.read_text().startswith("<!doctype html>")
    assert [trial.status for trial in result.trials][2:4] == ["stopped", "failed"]
    assert result.trials[2].reason.startswith("asha")
    assert repr(result) == "<SearchResult find-0001: complete, 6 trials, best is trial 2: loss 0.3000>"
    assert "params.kind" in result._repr_html_()
    assert pickle.loads(pickle.dumps(result)).best == best


def test_a_search_that_has_ended_has_its_report_before_trackers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = told_search(tmp_path).tell("search-ended", reason="complete").folder
    ended: list[Any] = []
    seen: list[tuple[bool, int]] = []

    def wait(_: Any) -> None:
        seen.append((SearchResult.read(folder).report.is_file(), len(ended)))
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run_search", lambda *_: SimpleNamespace(end=ended.append))
    monkeypatch.setattr(search, "catch_up_on_ended", wait)
    try:
        result = search.run(cast(Any, None), folder)
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("Ctrl-C has ended more than the wait")
    assert result.best_job.is_file()
    assert seen == [(True, 1)]


def test_a_search_that_was_killed_is_read_as_well(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    result = open_search("last", tmp_path)
    assert (result.status, result.exit_code) == ("lost", 1)
    with pytest.raises(RunError, match="trial 6 of find-0001 has no run"):
        _ = result.trials[5].run
    assert SearchResult.read(teller.folder).trials == result.trials


def test_without_a_trial_there_is_no_best(tmp_path: Path) -> None:
    result = conclude(search_folder(tmp_path).folder)
    assert (result.best, result.trials, result.front) == (None, (), ())
    assert not result.best_job.exists()
    assert result.report.exists()


def test_a_row_for_each_trial(tmp_path: Path) -> None:
    frame = SearchResult.read(told_search(tmp_path).folder).to_dataframe()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame.loc[2, "loss"] == 0.3
    assert frame.loc[3, "status"] == "stopped"
    assert SearchResult.read(search_folder(tmp_path).folder).to_dataframe().empty
