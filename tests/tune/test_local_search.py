"""Searches on this machine, without Ray: what is in their folder, and what is left of them when somebody dies."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from command import Running, Workplace, await_condition
from quorate.api.result import open_run
from quorate.core.errors import JobFileError, Problem, QuorateError, RequestError, RunError
from quorate.core.installation import install_of
from quorate.tune import local_search, proposal, search
from quorate.tune.loading import ResolvedSearch, load_recorded_search, read_mapping, read_search
from quorate.tune.proposal import with_task
from quorate.tune.result import SearchResult
from quorate.tune.search import run_search
from tune.search_builder import search_folder

TASK = Path(__file__).parents[1] / "tune_task.py"
STEPS = 40
RATES = {"params.learning_rate": {"loguniform": [0.001, 1.0]}, "params.width": {"choice": [2, 4, 8]}}
pytestmark = pytest.mark.timeout(400)


def keys_of(folder: Path, job: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Those of a small search."""
    fixed = {"task": f"{TASK}:Small", "lanes": 1, "batch_size": 24, "steps": STEPS}
    often = {"evaluate": {"every": 10}, "checkpoint": {"every": 5}}
    usual = {"name": "small", "metric": "accuracy", "mode": "max", "space": RATES, "concurrent": 1}
    whole = {**fixed, **often, **(job or {})}
    return {**usual, "budget": {"trials": 3}, "runs": str(folder / "runs"), "job": whole, **keys}


def resolved(folder: Path, **keys: Any) -> ResolvedSearch:
    return read_mapping(keys_of(folder, **keys), "search", {}).accepted()


def searched(folder: Path, **keys: Any) -> SearchResult:
    """From this process, as a program does it."""
    found = resolved(folder, **keys)
    return search.run(found, search.begin(found))


def digests(result: SearchResult) -> dict[int, str]:
    return {trial.number: trial.weights_digest for trial in result.trials if trial.status == "finished"}


def test_a_random_search_has_the_trials_that_its_spec_draws_and_their_bits(tmp_path: Path) -> None:
    result = searched(tmp_path, concurrent=2)
    assert (result.status, result.exit_code) == ("complete", 0)
    spec = result.spec
    assert spec is not None
    assert {trial.number: trial.params for trial in result.trials} == {n: spec.params(n) for n in (1, 2, 3)}
    assert [len(trial.curve) for trial in result.trials] == [STEPS // 10] * 3
    assert result.report.is_file() and result.best is not None
    assert len(set(digests(result).values())) == 3


def test_trials_that_another_search_has_trained_are_not_trained_again(tmp_path: Path) -> None:
    def reused(result: SearchResult) -> list[str | None]:
        results = [result.folder / "trials" / trial.run_name / "result.json" for trial in result.trials]
        return [json.loads(each.read_text()).get("reused_from") for each in results]

    first, again = (searched(tmp_path, budget={"trials": 2}) for _ in range(2))
    assert reused(first) == [None, None] and reused(again) == ["trial-0001", "trial-0002"]
    assert digests(first) == digests(again)
    assert [trial.curve for trial in first.trials] == [trial.curve for trial in again.trials]
    assert [trial.status for trial in again.trials] == ["finished"] * 2
    assert open_run(again.folder / "trials" / "trial-0001").load_model() is not None
    fresh = searched(tmp_path, budget={"trials": 1}, job={"reuse": False})
    assert reused(fresh) == [None] and digests(fresh)[1] == digests(first)[1]


def test_a_grid_goes_on_without_a_trial_that_fails(tmp_path: Path) -> None:
    space = {"params.fails": {"choice": [True, False]}, "params.width": {"choice": [4]}}
    result = searched(tmp_path, space=space, algorithm="grid")
    assert [trial.status for trial in result.trials] == ["failed", "finished"]
    assert "this trial cannot be trained" in result.trials[0].reason


def test_tpe_learns_from_trials_that_asha_ends_early(tmp_path: Path) -> None:
    result = searched(
        tmp_path,
        space={"params.learning_rate": {"loguniform": [0.0001, 1.0]}},
        algorithm={"kind": "optuna", "startup_trials": 3},
        scheduler={"kind": "asha", "reduction": 2},
        budget={"trials": 6},
    )
    stopped = [trial for trial in result.trials if trial.status == "stopped"]
    assert stopped and len(digests(result)) + len(stopped) == 6
    assert all("is not among the best 1/2 there" in trial.reason for trial in stopped)
    assert min(trial.steps for trial in stopped) < STEPS
    assert result.best is not None and result.best.status == "finished"


@pytest.mark.parametrize(("budget", "reason"), [({"steps": 50}, "of 50 steps"), ({"minutes": 0.001}, "0.001 minutes")])
def test_a_budget_that_is_spent_ends_the_search_in_order(tmp_path: Path, budget: Any, reason: str) -> None:
    result = searched(tmp_path, budget={"trials": 9, **budget})
    assert result.status == "complete" and reason in result.reason
    assert len(result.trials) < 9
    assert {trial.status for trial in result.trials} <= {"finished", "stopped"}


def test_values_that_do_not_go_together_are_a_failed_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise JobFileError("search", [Problem("steps", "it is shorter than the warmup")])

    monkeypatch.setattr(ResolvedSearch, "trial_job", refuse)
    result = searched(tmp_path, budget={"trials": 2})
    assert [trial.status for trial in result.trials] == ["failed", "failed"]
    assert "shorter than the warmup" in result.trials[0].reason


def test_a_metric_that_is_not_reported_ends_the_search_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="Did you mean accuracy") as refused:
        searched(tmp_path, metric="acuracy", job={"evaluate": {"every": 10, "metric": "accuracy", "mode": "max"}})
    assert refused.value.exit_code == 2
    # The first may have come to its end before it was asked to stop; no other was begun.
    assert len(SearchResult.read(search.recorded(tmp_path / "runs", "last")[1]).trials) == 1


def test_a_library_that_is_missing_is_named_before_the_task_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposal, "find_spec", lambda _: None)
    (tmp_path / "task.py").write_text("raise RuntimeError('imported')\n")
    rates = {"params.learning_rate": {"loguniform": [0.001, 1.0]}}

    def refusal(**keys: Any) -> str:
        document = keys_of(tmp_path, {"task": "task.py:Small"}, **{"space": rates, "budget": {"trials": 4}, **keys})
        (tmp_path / "search.yaml").write_text(json.dumps(document))
        with pytest.raises(QuorateError) as refused:
            with_task(read_search(tmp_path / "search.yaml", {}))
        return refused.value.message

    needs_ray = f"needs the library ray, which is not installed here: {install_of('ray')}."
    needs_optuna = f"needs the library optuna, which is not installed here: {install_of('tune')}."
    assert refusal(scheduler="pbt") == f"scheduler: pbt {needs_ray}"
    assert refusal(engine="ray") == f"engine: ray {needs_ray}"
    assert refusal(address="auto") == f"address: auto {needs_ray}"
    assert refusal(algorithm="optuna") == f"algorithm: optuna {needs_optuna}"
    assert refusal(scheduler="asha") == f"scheduler: asha {needs_optuna}"
    assert refusal(scheduler="hyperband") == f"scheduler: hyperband {needs_optuna}"
    assert "imported" in refusal(), "a random search needs none"
    assert "pbt (search.yaml" in refusal(scheduler="pbt", engine="local")
    assert "names a cluster" in refusal(address="auto", engine="local")


def test_each_trial_has_gpus_of_its_own_unless_it_takes_a_part_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_search, "gpus_here", lambda: ("4", "5", "6", "7"))
    monkeypatch.setattr(local_search, "usable_cores", lambda: 3)
    on_gpu = {"device": "cuda"}

    def places(**keys: Any) -> list[str]:
        return local_search.places_here(resolved(tmp_path, **{"concurrent": None, **keys}))

    assert places(job={"device": "cpu"}) == ["", "", ""]
    assert places(job={"device": "cpu"}, concurrent=5) == [""] * 5
    assert places(job=on_gpu) == ["4", "5", "6"]
    assert places(job=on_gpu, concurrent=9) == ["4", "5", "6", "7"]
    assert places(job={**on_gpu, "lanes": 2}, trial={"workers": 2}, concurrent=9) == ["4,5", "6,7"]
    assert places(job=on_gpu, trial={"gpu": 0.5}, concurrent=3) == ["4", "4", "5"]
    with pytest.raises(RequestError, match=r"takes 5 GPU on this machine .* and it has 4"):
        places(job={**on_gpu, "lanes": 5}, trial={"workers": 5})


def test_trials_of_another_search_in_the_storage_are_not_taken_for_its_own(tmp_path: Path) -> None:
    storage = tmp_path / "shared"
    first = search_folder(tmp_path / "one", storage=str(storage)).folder
    (storage / first.name / "trials" / "trial-0001").mkdir(parents=True)
    with pytest.raises(RunError, match="has the trials of another search"):
        run_search(load_recorded_search(first.path), first, None, lambda: None)
    assert first.trials.is_dir() and not first.trials.is_symlink()


class Searches:
    """Commands in a folder, with its search file."""

    def __init__(self, place: Workplace) -> None:
        self.place = place
        shutil.copy(TASK, place.folder / "task.py")
        self.go = place.folder / "faster"

    def write(self, **keys: Any) -> None:
        params = {"pause": 0.1, "go": str(self.go)}
        job = {"task": "task.py:Small", "params": params, **keys.pop("job", {})}
        document = keys_of(self.place.folder, job, **keys)
        (self.place.folder / "search.yaml").write_text(json.dumps(document))

    def start(self, *arguments: str) -> Running:
        return self.place.start("tune", *(arguments or ["search.yaml"]))

    def lines(self) -> list[dict[str, Any]]:
        file = self.place.folder / "runs" / "small-0001" / "trials.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == kind]

    def trained(self) -> dict[int, str]:
        return {line["trial"]: line["digest"] for line in self.of_kind("finished")}

    def await_report(self, trial: int) -> None:
        told: Callable[[], bool] = lambda: any(line["trial"] == trial for line in self.of_kind("reported"))  # noqa: E731
        await_condition(f"an evaluation of trial {trial}", told)


@pytest.fixture
def searches(workplace: Workplace) -> Searches:
    return Searches(workplace)


@pytest.mark.faults
def test_a_killed_search_leaves_nobody_and_goes_on_to_the_same_trials(searches: Searches) -> None:
    searches.write(space={"params.pause": {"grid": [0.0, 0.2]}})
    killed = searches.start()
    searches.await_report(2)
    killed.process.kill()
    killed.done()
    searches.place.assert_nobody_left()
    assert searches.trained().keys() == {1}
    before = len(searches.lines())

    searches.go.touch()
    resumed = searches.start("--resume", "last").done()
    assert resumed.code == 0, resumed.stderr
    assert {line.get("trial") for line in searches.lines()[before:]} == {None, 2}, "the first was trained again"
    assert [line["step"] > 0 for line in searches.of_kind("resumed")] == [True]
    undisturbed = searches.place.run(
        "train", "runs/small-0001/trials/trial-0002/job.yaml", "--set", "runs=again", "--json"
    )
    assert searches.trained()[2] == undisturbed.document["weights_digest"]


@pytest.mark.faults
def test_a_trial_whose_process_was_killed_goes_on_from_its_checkpoint(searches: Searches) -> None:
    searches.write(budget={"trials": 1})
    running = searches.start()
    searches.await_report(1)
    (process,) = searches.place.pids("quorate.tune.local_search")
    os.kill(process, signal.SIGKILL)
    await_condition("it goes on", lambda: searches.of_kind("resumed"))
    searches.go.touch()
    done = running.done()
    assert done.code == 0, done.stderr
    assert searches.trained().keys() == {1}


def test_ctrl_c_ends_trials_in_order_and_they_go_on_later(searches: Searches) -> None:
    searches.write(concurrent=2, budget={"trials": 2})
    running = searches.start()
    searches.await_report(1)
    searches.await_report(2)
    running.interrupt()
    done = running.done()
    assert done.code == 130, done.stderr
    searches.place.assert_nobody_left()
    assert searches.of_kind("search-ended")[-1]["reason"] == "interrupted"
    assert not searches.of_kind("stopped") and "Traceback" not in done.stderr

    searches.go.touch()
    resumed = searches.start("--resume", "last").done()
    assert resumed.code == 0, resumed.stderr
    assert {line["trial"] for line in searches.of_kind("resumed")} == {1, 2}
    assert searches.trained().keys() == {1, 2}
