"""Searches on Ray Tune: what is in their folder, and what is left of them when the driver, a worker or a trial dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from command import await_condition
from quorate.storage.run_folder import RunFolder

TASK = Path(__file__).parent / "tune_task.py"
PATIENCE = 400.0
STEPS = 40
pytestmark = pytest.mark.timeout(900)  # a busy machine takes minutes until trials have begun


class Searches:
    """A folder with a search file, and the command in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(TASK, folder / "task.py")
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
    return Searches(tmp_path)


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


def test_a_random_search_leaves_runs_that_train_again_to_the_same_bits(searches: Searches) -> None:
    searches.write()
    answer = json.loads(searches.run("tune", "search.yaml", "--json"))
    assert answer["reason"] == "complete"

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


def _is_half_done(searches: Searches, name: str) -> bool:
    ended = {line["trial"] for line in searches.of_kind("finished", name)}
    under_way = {line["trial"] for line in searches.of_kind("reported", name)} - ended
    return bool(ended) and bool(under_way)
