"""A search read back from its folder: trials, the best of them, what it cost; whatever its files have come to."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.history.run_record import Status
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import finite
from quorate.tune.findings import (
    FEWEST,
    advise_on_search,
    explained,
    importance_of,
    job_of_best,
    search_document,
    search_summary,
    write_best_job,
)
from quorate.tune.result import SearchResult
from quorate.tune.trials import SearchLog, Trial, TrialStatus
from schemas import validate
from tune.search_builder import Teller, add_run, decided_by_rate, exploited_search, search_folder, told_search


def record_of(teller: Teller) -> SearchResult:
    record = SearchResult.read(teller.folder)
    validate("search", finite(search_document(record, record.search)))
    return record


def trial_of(record: SearchResult, number: int) -> Trial:
    return next(trial for trial in record.trials if trial.number == number)


def test_each_trial_as_the_driver_told_it(tmp_path: Path) -> None:
    record = record_of(told_search(tmp_path))
    assert [trial.status.value for trial in record.trials] == [
        *("finished", "finished", "stopped", "failed", "unfinished", "proposed")
    ]
    first, stopped, failed = (trial_of(record, number) for number in (1, 3, 4))
    assert (first.steps, first.seconds, first.weights_digest, first.node) == (100, 10.0, "01" * 32, "10.0.0.1")
    assert first.curve == ((20, 0.9), (40, 0.7), (60, 0.6), (80, 0.55), (100, 0.5))
    assert stopped.reason.startswith("asha: 1.9000")
    assert failed.reason == "RuntimeError: <b>no</b> | such thing"
    assert failed.values == ()
    assert (record.steps, record.saved_steps) == (100 + 100 + 40 + 20, 60)
    assert record.planned == 6
    assert record.training_seconds == 20.0
    assert record.keys == ("params.learning_rate", "params.kind", "batch_size")


def test_the_best_is_by_the_best_evaluation_and_ties_go_to_the_earlier_trial(tmp_path: Path) -> None:
    teller = search_folder(tmp_path)
    teller.begin(3).report(3, 0.2, 0.9).finish(3, 0.9)
    teller.begin(1).report(1, 0.5, 0.4).finish(1, 0.4)
    teller.begin(2).report(2, 0.3, 0.2).finish(2, 0.2)
    teller.begin(4).report(4, 0.01).tell("failed", 4, message="lost")
    record = record_of(teller)
    assert [trial.number for trial in record.ranked] == [2, 3, 1]
    best = record.best
    assert best is not None
    assert best.best is not None
    assert (best.number, best.best.value, best.best.step) == (2, 0.2, 40)


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric="accuracy", mode="max")
    for trial, value in ((1, None), (2, math.inf), (3, 0.25)):
        teller.begin(trial).tell("reported", trial, step=20, metrics={"accuracy": value}, best=False)
    record = record_of(teller)
    assert [trial.number for trial in record.ranked] == [3]


def test_how_a_search_stands(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    record = record_of(teller)
    assert record.status is Status.LOST
    advice = advise_on_search(record, "find-0001")
    assert advice is not None
    assert advice.command == "quorate tune --resume find-0001"
    with teller.folder.lock():
        record = record_of(teller)
        assert record.status is Status.RUNNING
        assert trial_of(record, 5).status is TrialStatus.RUNNING
        assert advise_on_search(record, "find-0001") is None
    teller.tell("search-ended", reason="interrupted")
    assert record_of(teller).status is Status.INTERRUPTED
    teller.tell("search-resumed", reason="").tell("search-ended", reason="complete")
    record = record_of(teller)
    assert (record.status, record.reason, record.resumed) == (Status.COMPLETE, "", 1)
    for reason, status in (("budget: 5 minutes are over", Status.COMPLETE), ("OSError: full", Status.FAILED)):
        record = record_of(teller.tell("search-ended", reason=reason))
        assert (record.status, record.reason) == (status, reason)


def test_a_search_that_never_began(tmp_path: Path) -> None:
    folder = search_folder(tmp_path).folder
    folder.log_file.unlink()
    record = SearchResult.read(folder)
    assert (record.status, record.trials) == (Status.LOST, ())
    assert "before its first trial" in record.reason


def test_time_in_which_nobody_worked_on_it_does_not_count(tmp_path: Path) -> None:
    teller = search_folder(tmp_path).begin(1)
    teller.time += 1000
    teller.tell("search-resumed", reason="").tell("resumed", 1, run="trial-0001", step=20).report(1, 0.5)
    assert record_of(teller).active_seconds == 2 + 2


def test_what_the_driver_did_not_hear_is_in_the_runs(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    add_run(teller, 5, {20: 0.95, 40: 0.1})
    add_run(teller, 3, {20: 2.0, 40: 1.9, 60: 0.01})
    add_run(teller, 1, dict.fromkeys((20, 40, 60, 80, 100), 0.5), complete=True)
    record = record_of(teller)
    assert trial_of(record, 5).curve == ((20, 0.95), (40, 0.1))
    assert record.best is not None
    assert record.best.number == 5
    # It was stopped at step 40: what it did until it had stopped depends on how quickly that was.
    assert trial_of(record, 3).curve == ((20, 2.0), (40, 1.9))
    assert trial_of(record, 3).steps == 60
    assert trial_of(record, 5).seconds is not None
    assert [trial.number for trial in record.trials if trial.has_run] == [1, 3, 5]
    without = SearchResult.read(teller.folder, with_runs=False)
    assert trial_of(without, 5).curve == ((20, 0.95),)


def test_torn_and_foreign_lines_are_counted_and_lose_nothing(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    before = record_of(teller)
    with teller.folder.log_file.open("a") as log:
        log.write('[]\n{"kind": "reported"}\n{"time": 1, "kind": "began", "trial": 99}\n{"time": 1, "kind": "odd"}\n')
        log.write('{"time": 3, "kind": "finis')
    record = record_of(teller)
    assert record.trials == before.trials
    assert len(record.problems) == 1
    assert record.problems[0].startswith("4 of the lines")


@given(st.lists(st.binary(max_size=60)))
def test_no_line_breaks_it(lines: list[bytes]) -> None:
    log = SearchLog()
    log.take_all([line + b"\n" for line in lines])
    assert log.unreadable_lines == sum(bool(line.strip()) for line in lines)


@pytest.mark.parametrize("damage", ["search", "job", "both"])
def test_a_search_whose_files_are_damaged_is_still_shown(tmp_path: Path, damage: str) -> None:
    teller = told_search(tmp_path)
    if damage != "job":
        teller.folder.search_file.write_text("{metric: [")
    if damage != "search":
        teller.folder.job_file.unlink()
    record = record_of(teller)
    assert (record.status is Status.DAMAGED) == (damage != "job")
    assert record.problems
    assert len(record.ranked) == 4
    assert (job_of_best(record) is None) == (damage != "search")


def test_the_best_job_is_the_base_with_the_params_of_the_trial(tmp_path: Path) -> None:
    teller = told_search(tmp_path)
    assert write_best_job(record_of(teller)) is not None
    file = teller.folder.best_job_file
    text = file.read_text()
    assert "trial 2, loss 0.3000" in text.splitlines()[0]
    assert "search.yaml: space.params.kind, trial 2" in text
    read = load_recorded(file, {}, [])
    base = load_recorded(teller.folder.job_file, {}, [])
    assert read.spec.params == {"learning_rate": 0.01, "kind": "adam"}
    assert read.spec.model_dump(exclude={"params"}) == base.spec.model_dump(exclude={"params"})


def test_without_an_evaluation_there_is_no_best_job(tmp_path: Path) -> None:
    teller = search_folder(tmp_path).begin(1)
    assert write_best_job(record_of(teller)) is None
    assert not teller.folder.best_job_file.exists()


def test_population_based_training_has_a_lineage_and_counts_only_what_was_kept(tmp_path: Path) -> None:
    record = record_of(exploited_search(tmp_path))
    best = record.best
    assert best is not None
    assert best.number == 3
    assert [(one.until, one.trial, one.params["params.learning_rate"]) for one in best.lineage] == [
        *((40, 1, 0.1), (80, 2, 0.08))
    ]
    assert best.params == {"params.learning_rate": 0.06}
    assert [step for step, _ in best.curve] == [20, 40, 60, 80, 100]
    assert best.steps == 100
    job = job_of_best(record)
    assert job is not None
    assert [part.model_dump() for part in job.spec.lineage] == [
        {"until": 40, "params": {"learning_rate": 0.1}},
        {"until": 80, "params": {"learning_rate": 0.08}},
    ]
    # The values before its branch are given up with what had them.
    assert trial_of(record, 2).best is not None
    assert trial_of(record, 2).parts[0].reports == {20: {"loss": 1.5}, 40: {"loss": 1.4}}


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, metric=["accuracy", "loss"], mode=["max", "min"], budget={"trials": 4})
    points = {1: (0.9, 0.5), 2: (0.8, 0.2), 3: (0.7, 0.3), 4: (0.9, 0.6)}
    for trial, (accuracy, loss) in points.items():
        teller.begin(trial).tell("reported", trial, step=20, metrics={"accuracy": accuracy, "loss": loss}, best=False)
    record = record_of(teller)
    assert [trial.number for trial in record.front] == [1, 2]
    assert record.best is not None
    assert record.best.number == 1


def test_importance_needs_trials_and_finds_what_decides(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, budget={"trials": 40})
    decided_by_rate(teller, FEWEST - 1)
    assert "too few" in importance_of(record_of(teller)).missing
    decided_by_rate(teller, 24, first=FEWEST)
    found = importance_of(record_of(teller))
    assert next(iter(found.shares)) == "params.learning_rate"
    assert "batch_size" not in found.shares  # the same in all trials
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert "by itself" in found.method


@given(st.lists(st.tuples(st.sampled_from(["a", "b", 1, 2.5]), st.floats(-1e6, 1e6)), min_size=1, max_size=40))
def test_what_is_explained_is_a_share(pairs: list[tuple[object, float]]) -> None:
    values, ranks = zip(*pairs, strict=True)
    assert 0 <= explained(values, ranks) <= 1 + 1e-9


def test_the_time_that_is_left(tmp_path: Path) -> None:
    teller = search_folder(tmp_path, budget={"trials": 4, "minutes": 10})
    assert SearchResult.read(teller.folder).seconds_left(0.0) == 600
    teller.begin(1).report(1, 0.5, 0.4, 0.3, 0.2, 0.1).finish(1, 0.1)
    record = SearchResult.read(teller.folder)
    assert record.share_done == 0.25
    assert record.seconds_left(30.0) == pytest.approx(90.0)
    assert record.seconds_left(590.0) == pytest.approx(10.0)


def test_a_summary_is_what_a_list_has(tmp_path: Path) -> None:
    record = record_of(told_search(tmp_path))
    summary = search_summary(record)
    assert json.loads(json.dumps(summary))["best"]["trial"] == 2
    assert summary["counts"]["stopped"] == 1
