"""Searches on Ray Tune: what is in their folder, and what is left of them when the driver, a worker or a trial dies."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.ray_nodes import RayNodes
from command import await_condition
from quorate.storage.run_folder import RunFolder
from schemas import validate
from services.mlflow_database import Database
from terminal import TerminalCommand

TASK = Path(__file__).parents[1] / "tune_task.py"
PATIENCE = 400.0
STEPS = 40
pytestmark = pytest.mark.timeout(900)  # a busy machine takes minutes until trials have begun


class Searches:
    """A folder with a search file, and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(TASK, folder / "task.py")
        self.common: dict[str, Any] = {"engine": "ray"}
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("QUORATE_")}

    def write(self, **keys: Any) -> None:
        job = {
            "task": "task.py:Small",
            "lanes": 2,
            "batch_size": 24,
            "steps": STEPS,
            "evaluate": {"every": 10},
            "checkpoint": {"every": 5},
            **keys.pop("job", {}),
        }
        search = {
            "version": 1,
            "name": "small",
            "job": job,
            "metric": "accuracy",
            "mode": "max",
            "space": {"params.learning_rate": {"loguniform": [0.001, 1.0]}, "params.width": {"choice": [2, 4, 8]}},
            "concurrent": 2,
            "trial": {"workers": 1},
            "budget": {"trials": 3},
            **self.common,
            **keys,
        }
        (self.folder / "search.yaml").write_text(yaml.safe_dump(search))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "quorate", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, start_new_session=True, **pipes)

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        told, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, told + errors
        return told + (errors if code else "")

    def search(self, name: str = "small-0001") -> Path:
        return self.folder / "runs" / name

    def lines(self, name: str = "small-0001") -> list[dict[str, Any]]:
        try:
            text = (self.search(name) / "trials.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def of_kind(self, kind: str, name: str = "small-0001") -> list[dict[str, Any]]:
        return [line for line in self.lines(name) if line["kind"] == kind]

    def digests(self, name: str = "small-0001") -> dict[int, str]:
        return {line["trial"]: line["digest"] for line in self.of_kind("finished", name)}


@pytest.fixture
def searches(tmp_path: Path) -> Searches:
    """With a Ray of their own."""
    return Searches(tmp_path)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2)
    yield cluster
    cluster.close()


@pytest.fixture
def on_nodes(tmp_path: Path, nodes: RayNodes) -> Searches:
    """On two nodes that are there already, each with room for two workers."""
    searches = Searches(tmp_path)
    searches.environment |= nodes.environment
    searches.common = {"address": "auto"}
    return searches


def processes_in(folder: Path) -> list[psutil.Process]:
    """Those that work on something in a folder, by their command line or their open files."""
    found = []
    for process in psutil.process_iter():
        try:
            told = " ".join(process.cmdline()) + " ".join(file.path for file in process.open_files())
        except (psutil.Error, OSError):
            continue
        if str(folder) in told and process.pid != os.getpid():
            found.append(process)
    return found


def test_a_search_with_a_ray_of_its_own_leaves_no_token_at_home(searches: Searches) -> None:
    home = searches.folder / "home"
    home.mkdir()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        del searches.environment[name]
    searches.environment["HOME"] = str(home)
    searches.write(budget={"trials": 1})
    assert json.loads(searches.run("tune", "search.yaml", "--json"))["status"] == "complete"
    assert not (home / ".ray").exists()


def test_a_random_search_leaves_runs_that_train_again_to_the_same_bits(searches: Searches) -> None:
    searches.write()
    answer = json.loads(searches.run("tune", "search.yaml", "--json"))
    validate("search", answer)
    assert answer["status"] == "complete"

    kinds = Counter(line["kind"] for line in searches.lines())
    assert kinds["search-began"] == kinds["search-ended"] == 1
    assert kinds["proposed"] == kinds["began"] == kinds["finished"] == 3
    assert kinds["reported"] == 3 * STEPS // 10

    # A trial is a run, and its job alone gives its bits.
    trials = searches.search() / "trials"
    run = RunFolder(trials / "trial-0002")
    told = json.loads(searches.run("show", "trial-0002", "--runs", str(trials), "--json"))
    assert told["status"] == "complete"
    again = json.loads(searches.run("train", str(run.job_file), "--set", "runs=again", "--json"))
    assert again["weights_digest"] == searches.digests()[2]
    assert (searches.search() / "report.html").is_file()


def test_a_search_whose_driver_is_killed_goes_on_to_the_same_trials(searches: Searches) -> None:
    searches.write(job={"params": {"pause": 0.03}}, budget={"trials": 4})
    searches.run("tune", "search.yaml")

    driver = searches.start("tune", "search.yaml")
    second = "small-0002"
    await_condition("a trial is done and another under way", lambda: _is_half_done(searches, second), PATIENCE)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    before = searches.lines(second)
    done = set(searches.digests(second))
    assert done and done != {1, 2, 3, 4}
    await_condition("all its processes have ended", lambda: not processes_in(searches.search(second)), PATIENCE)

    searches.run("tune", "--resume", second)
    kinds = Counter(line["kind"] for line in searches.lines(second)[len(before) :] if line.get("trial") in done)
    assert not kinds, "a finished trial was touched again"
    resumed = {line["trial"]: line["step"] for line in searches.of_kind("resumed", second)}
    assert resumed and all(step > 0 for step in resumed.values())
    assert searches.digests(second) == searches.digests()
    proposed = [[line["params"] for line in searches.of_kind("proposed", name)] for name in ("small-0001", second)]
    assert proposed[0] == proposed[1]


PBT = {"kind": "pbt", "interval": 10, "quantile": 0.5}
HYPERBAND = {"kind": "hyperband", "reduction": 2}


@pytest.mark.long
def test_a_killed_search_whose_trials_wait_for_each_other_ends_as_one_that_was_not(on_nodes: Searches) -> None:
    go = on_nodes.folder / "go"
    rates = {"params.learning_rate": {"loguniform": [0.0005, 0.5]}}
    job = {"params": {"pause": 0.2, "go": str(go)}}
    on_nodes.write(job=job, space=rates, scheduler=PBT, budget={"trials": 4})
    go.touch()
    on_nodes.run("tune", "search.yaml")

    go.unlink()
    second = "small-0002"
    driver = on_nodes.start("tune", "search.yaml")
    await_condition("some have gone on after others", lambda: bool(on_nodes.of_kind("resumed", second)), PATIENCE)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert on_nodes.digests(second).keys() < on_nodes.digests().keys()
    await_condition("all its processes have ended", lambda: not processes_in(on_nodes.search(second)), PATIENCE)

    go.touch()
    on_nodes.run("tune", "--resume", second)
    assert on_nodes.digests(second) == on_nodes.digests()
    decisions = [
        {(line["trial"], line["step"], line.get("from")) for line in on_nodes.of_kind("exploited", name)}
        for name in ("small-0001", second)
    ]
    assert decisions[0] == decisions[1] != set()


def test_nodes_train_the_code_that_was_sent_to_them(on_nodes: Searches) -> None:
    go = on_nodes.folder / "go"
    job = {"params": {"pause": 1.0, "go": str(go)}, "evaluate": {"every": 2}}
    on_nodes.write(job=job, budget={"trials": 2}, concurrent=1)
    driver = on_nodes.start("tune", "search.yaml")
    await_condition("the first is under way", lambda: bool(on_nodes.of_kind("reported")), PATIENCE)
    (on_nodes.folder / "task.py").write_text("raise RuntimeError('no node needs this file')\n")
    go.touch()
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, errors
    assert set(on_nodes.digests()) == {1, 2}


@pytest.mark.parametrize(
    ("budget", "reason"),
    [({"steps": 50}, "of 50 steps are spent"), ({"trials": 9, "minutes": 0.02}, "budget: 0.02 minutes are over")],
)
def test_a_budget_that_is_spent_ends_the_search_in_order(
    on_nodes: Searches, budget: dict[str, Any], reason: str
) -> None:
    on_nodes.write(job={"params": {"pause": 0.05}}, budget=budget, storage=str(on_nodes.folder / "shared"))
    on_nodes.run("tune", "search.yaml")
    assert reason in on_nodes.of_kind("search-ended")[-1]["reason"]
    told = json.loads(on_nodes.run("show", "small-0001", "--json"))
    assert told["status"] == "complete" and len(told["trials"]) < 9
    assert {line["reason"].partition(":")[0] for line in on_nodes.of_kind("stopped")} <= {"budget"}
    # And the runs are where all nodes reach them.
    runs = sorted(path.name for path in (on_nodes.folder / "shared" / "small-0001" / "trials").glob("trial-*"))
    assert runs == sorted(path.name for path in (on_nodes.search() / "trials").glob("trial-*"))


def test_a_signal_while_ray_starts_ends_that_as_well(searches: Searches) -> None:
    searches.environment["THIS_SEARCH"] = str(searches.folder)
    searches.write(budget={"trials": 1})
    driver = searches.start("tune", "search.yaml")
    await_condition("it has begun", (searches.search() / "lock").exists, PATIENCE)
    assert not searches.lines()
    _ended_by(driver, signal.SIGINT)
    assert searches.of_kind("search-ended")[-1]["reason"] == "interrupted"
    await_condition("nothing of it is left", lambda: not _of_environment("THIS_SEARCH", searches.folder), PATIENCE)


def test_a_search_that_was_ended_before_its_first_trial_is_resumed(on_nodes: Searches) -> None:
    on_nodes.write(budget={"trials": 1})
    driver = on_nodes.start("tune", "search.yaml")
    await_condition("it has begun", lambda: bool(on_nodes.lines()), PATIENCE)
    assert not on_nodes.of_kind("reported")
    _ended_by(driver, signal.SIGTERM)
    assert on_nodes.of_kind("search-ended")[-1]["reason"] == "terminated"
    on_nodes.run("tune", "--resume", "last")
    assert set(on_nodes.digests()) == {1}


def _ended_by(driver: "subprocess.Popen[str]", number: signal.Signals) -> None:
    driver.send_signal(number)
    told, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 128 + number, told + errors
    assert "Traceback" not in errors


def _of_environment(name: str, value: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == str(value):
                found.append(process)
    return found


def test_a_terminal_shows_a_table_of_the_trials(on_nodes: Searches) -> None:
    on_nodes.write(job={"params": {"pause": 0.05}})
    with TerminalCommand(on_nodes.folder, 100, "tune", "search.yaml", **on_nodes.environment) as command:
        await_condition("a trial is shown", lambda: any("running" in line for line in command.screen), PATIENCE)
        assert command.ended(PATIENCE) == 0
        shown = "\n".join(command.screen)
    assert "small-0001" in shown and "best" in shown
    assert shown.count("finished") >= 3


def _is_half_done(searches: Searches, name: str) -> bool:
    ended = {line["trial"] for line in searches.of_kind("finished", name)}
    under_way = {line["trial"] for line in searches.of_kind("reported", name)} - ended
    return bool(ended) and bool(under_way)


def test_ctrl_c_stops_trials_in_order_and_the_search_goes_on_later(on_nodes: Searches) -> None:
    go = on_nodes.folder / "go"
    params = {"pause": 1.0, "go": str(go)}
    on_nodes.write(job={"params": params, "checkpoint": {"minutes": 0}, "evaluate": {"every": 2}}, budget={"trials": 2})
    driver = on_nodes.start("tune", "search.yaml")
    await_condition("both are under way", lambda: len({each["trial"] for each in on_nodes.of_kind("reported")}) == 2)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 130, errors
    assert on_nodes.of_kind("search-ended")[-1]["reason"] == "interrupted"
    assert not on_nodes.of_kind("stopped"), "a trial that goes on later was not stopped for good"
    for number in (1, 2):
        told = RunFolder(on_nodes.search() / "trials" / f"trial-000{number}").whole_result()
        assert told is not None and told["status"] == "interrupted" and told["steps"] > 0

    go.touch()
    on_nodes.run("tune", "--resume", "last")
    assert {line["trial"] for line in on_nodes.of_kind("resumed")} == {1, 2}
    assert set(on_nodes.digests()) == {1, 2}


def test_a_trial_that_fails_is_told_and_the_others_go_on(on_nodes: Searches) -> None:
    space = {"params.fails": {"grid": [True, False]}, "params.width": {"choice": [4, 8]}}
    on_nodes.write(algorithm="random", space=space, budget={"trials": 2})
    on_nodes.run("tune", "search.yaml")
    (failed,) = on_nodes.of_kind("failed")
    assert failed["trial"] == 1 and "this trial cannot be trained" in failed["message"]
    assert set(on_nodes.digests()) == {2}
    best = yaml.safe_load((on_nodes.search() / "best-job.yaml").read_text())
    assert best["params"]["fails"] is False


def test_a_metric_that_is_not_reported_ends_the_search_with_those_that_are(on_nodes: Searches) -> None:
    on_nodes.write(metric="acuracy", mode="max", budget={"trials": 3})
    told = on_nodes.run("tune", "search.yaml", code=2)
    assert "Did you mean accuracy?" in told
    assert not on_nodes.of_kind("finished")


def test_asha_stops_the_worse_and_says_why(on_nodes: Searches) -> None:
    rates = {"params.learning_rate": {"grid": [0.5, 0.3, 0.001, 0.0005]}}
    on_nodes.write(space=rates, concurrent=1, scheduler={"kind": "asha", "grace": 10, "reduction": 2})
    on_nodes.run("tune", "search.yaml", "--set", "budget.trials=4")
    stopped = {line["trial"]: line for line in on_nodes.of_kind("stopped")}
    assert {3, 4} <= stopped.keys() and 1 not in stopped
    assert stopped[3]["reason"].startswith("asha: ") and "at step 10 is not among the best 1/2" in stopped[3]["reason"]
    steps = sum(
        max(line["step"] for line in on_nodes.of_kind("reported") if line["trial"] == number) for number in (3, 4)
    )
    assert steps < STEPS


def test_the_best_job_of_a_population_trains_again_to_its_digest(on_nodes: Searches) -> None:
    rates = {"params.learning_rate": {"loguniform": [0.0005, 0.5]}}
    on_nodes.write(space=rates, scheduler=PBT, budget={"trials": 4})
    on_nodes.run("tune", "search.yaml")
    exploited = on_nodes.of_kind("exploited")
    assert exploited and all(line["step"] % 10 == 0 for line in exploited)
    assert set(on_nodes.digests()) == {1, 2, 3, 4}
    for line in exploited:
        assert (on_nodes.search() / "trials" / line["run"] / "result.json").is_file()

    # One that was exploited, by its own job; and the best, by the file for it.
    last = exploited[-1]
    again = json.loads(
        on_nodes.run(
            "train", str(on_nodes.search() / "trials" / last["run"] / "job.yaml"), "--set", "runs=again", "--json"
        )
    )
    assert again["weights_digest"] == on_nodes.digests()[last["trial"]]
    best = json.loads(on_nodes.run("show", "small-0001", "--json"))["best"]
    again = json.loads(on_nodes.run("train", str(on_nodes.search() / "best-job.yaml"), "--set", "runs=again", "--json"))
    assert again["weights_digest"] == best["weights_digest"]

    # Decided by evaluations and seed alone: another search does the same.
    on_nodes.run("tune", "search.yaml", "--set", "concurrent=1")
    assert on_nodes.digests("small-0002") == on_nodes.digests()


def test_hyperband_drops_the_worse(on_nodes: Searches) -> None:
    rates = {"params.learning_rate": {"grid": [0.3, 0.2, 0.1, 0.5, 0.4, 0.001, 0.0005, 0.0001]}}
    on_nodes.write(space=rates, scheduler=HYPERBAND, budget={"trials": 8})
    on_nodes.run("tune", "search.yaml")
    ended = on_nodes.digests().keys() | {line["trial"] for line in on_nodes.of_kind("stopped")}
    assert ended == set(range(1, 9))
    assert on_nodes.of_kind("stopped")
    assert all(line["reason"].startswith("hyperband: ") for line in on_nodes.of_kind("stopped"))


def test_optuna_with_two_metrics_is_tracked_below_one_run(on_nodes: Searches) -> None:
    on_nodes.write(
        algorithm={"kind": "optuna", "startup_trials": 1},
        metric=["accuracy", "loss"],
        mode=["max", "min"],
        job={"track": {"mlflow": True}},
    )
    on_nodes.run("tune", "search.yaml")
    assert set(on_nodes.digests()) == {1, 2, 3}
    database = Database(on_nodes.folder / "runs" / "mlflow.db")
    assert database.runs() == {"small-0001": "FINISHED"} | {f"trial-000{number}": "FINISHED" for number in (1, 2, 3)}
    parents = {database.pairs("tags", f"trial-000{number}")["mlflow.parentRunId"] for number in (1, 2, 3)}
    assert len(parents) == 1


def _trackers(run: Path) -> list[psutil.Process]:
    return [each for each in processes_in(run) if "quorate.api.tracker" in each.cmdline()]


def test_a_trial_that_stopped_just_before_its_driver_was_killed_is_in_mlflow_after_a_resume(searches: Searches) -> None:
    rates = {"params.learning_rate": {"grid": [0.5, 0.0005]}}
    asha = {"kind": "asha", "grace": 10, "reduction": 2}
    job = {"track": {"mlflow": True}}
    searches.write(space=rates, concurrent=1, scheduler=asha, job=job, budget={"trials": 2})
    driver = searches.start("tune", "search.yaml")
    run = searches.search() / "trials" / "trial-0002"
    (tracker,) = await_condition("the second trial is tracked", lambda: _trackers(run), PATIENCE)
    tracker.suspend()  # it still imports its libraries
    await_condition("it is stopped early", lambda: searches.of_kind("stopped"), PATIENCE)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    tracker.kill()
    await_condition("all its processes have ended", lambda: not processes_in(searches.search()), PATIENCE)
    database = Database(searches.folder / "runs" / "mlflow.db")
    assert "trial-0002" not in database.runs() and [line["trial"] for line in searches.of_kind("stopped")] == [2]

    away = searches.folder / "runs" / "away.db"
    (searches.folder / "runs" / "mlflow.db").rename(away)
    (searches.folder / "runs" / "mlflow.db").mkdir()
    resumed = searches.start("tune", "--resume", "last")
    assert "quorate track runs/small-0001/trials/trial-0002" in resumed.communicate(timeout=PATIENCE)[1]
    (searches.folder / "runs" / "mlflow.db").rmdir()
    away.rename(searches.folder / "runs" / "mlflow.db")

    searches.run("tune", "--resume", "last")
    assert database.runs().keys() == {"small-0001", "trial-0001", "trial-0002"}
    assert database.runs()["trial-0002"] == "KILLED", "as every trial that was stopped early"
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = {each["step"] for each in told if each["kind"] == "step"}
    assert {step for step, _ in database.curves("trial-0002")["train/loss"]} == steps


def test_a_killed_worker_and_a_killed_node_cost_no_trial(on_nodes: Searches, nodes: RayNodes) -> None:
    marker = on_nodes.folder / "killed"
    go = on_nodes.folder / "go"
    params = {"pause": 0.5, "go": str(go), "kill": str(marker)}
    # Of two workers each, so that one trial is on each node.
    job = {"params": params, "evaluate": {"every": 2}, "checkpoint": {"every": 2}}
    on_nodes.write(job=job, budget={"trials": 2}, trial={"workers": 2})
    driver = on_nodes.start("tune", "search.yaml")
    await_condition("both are under way", lambda: len({each["trial"] for each in on_nodes.of_kind("reported")}) == 2)
    assert marker.exists()
    assert not on_nodes.of_kind("finished")
    nodes.kill_last()
    go.touch()
    try:
        _, errors = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0, errors
    finally:
        nodes.add(2)
    assert set(on_nodes.digests()) == {1, 2}
    assert on_nodes.of_kind("resumed"), "the node had no trial"
    told = [RunFolder(on_nodes.search() / "trials" / f"trial-000{number}").events_file.read_text() for number in (1, 2)]
    assert any('"kind":"worker-lost"' in text or '"kind":"lost"' in text for text in told), "no worker was lost"
    for number, digest in on_nodes.digests().items():
        file = on_nodes.search() / "trials" / f"trial-000{number}" / "job.yaml"
        again = json.loads(on_nodes.run("train", str(file), "--set", "runs=again", "--set", "workers=1", "--json"))
        assert again["weights_digest"] == digest
