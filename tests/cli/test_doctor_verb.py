import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from command import Workplace
from schemas import validate
from terminal import TerminalCommand


@pytest.fixture
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch cannot be imported, which is also quick."""
    folder = tmp_path_factory.mktemp("without-torch")
    (folder / "torch.py").write_text("raise ImportError('libtorch_cpu.so is not there')")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in document["findings"]}


# A machine may have too little of them, and runs these tests all the same.
RESOURCES = {"memory", "open files", "runs folder"}


@pytest.mark.long
def test_what_jobs_need_is_here(workplace: Workplace) -> None:
    done = workplace.run("doctor", "--json")
    validate("doctor", done.document)
    found = by_name(done.document)
    problems = {name for name, finding in found.items() if finding["level"] == "problem"}
    assert problems <= RESOURCES, done.stdout
    assert (done.code, done.stderr) == (1 if problems else 0, "")
    assert found["torch"]["level"] == "ok"
    assert "same bits twice" in found["torch"]["text"]
    assert found["devices"]["level"] == "note"
    assert found["packages"]["level"] == "ok"
    assert found["extras"]["text"].startswith("installed: ")
    assert found["coordinators"]["text"] == "no job is running in runs"
    assert not (workplace.folder / "runs").exists()


def test_a_running_job_is_called_and_troubles_around_it_are_told(
    workplace: Workplace, without_torch: dict[str, str]
) -> None:
    training = workplace.start("train", "job.yaml", "--workers", "1", "--steps", "1000", PAUSE="0.05")
    training.await_event("step")
    token = json.loads((workplace.last / "coordinator.json").read_text())["token"]
    done = workplace.start("doctor", "--json", **without_torch).done()
    validate("doctor", done.document)
    found = by_name(done.document)
    assert (done.code, done.document["status"], done.stderr) == (1, "problem", "")
    assert found["run tiny-0001"]["level"] == "ok"
    assert "its job is under way" in found["run tiny-0001"]["text"]
    assert found["torch"]["level"] == "problem"
    assert "libtorch_cpu.so is not there" in found["torch"]["text"]
    assert "pip install 'torch" in found["torch"]["remedy"]
    assert token not in done.stdout

    training.interrupt()
    assert training.done().code == 130


def test_one_run_of_many_is_named(workplace: Workplace, without_torch: dict[str, str], finished: Path) -> None:
    runs = str(finished / "runs")
    last = by_name(workplace.run("doctor", "last", "--json", QUORATE_RUNS=runs, **without_torch).document)
    assert last["run tiny-0001"]["text"] == "is not running (complete)"
    assert last["run tiny-0001"]["level"] == "note"
    absent = workplace.run("doctor", "tinny", "--runs", runs)
    assert (absent.code, absent.stdout) == (2, "")
    assert "did you mean tiny-0001?" in absent.error


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.long), 40])
def test_a_person_sees_what_is_wrong_and_what_to_do(
    workplace: Workplace, without_torch: dict[str, str], width: int
) -> None:
    with TerminalCommand(workplace.folder, width, "doctor", **without_torch) as command:
        assert command.ended() == 1
    words = " ".join(" ".join(command.screen).split())
    assert "problem torch cannot be used: ImportError: libtorch_cpu.so is not there → Install it again:" in words
    assert re.search(r"\d+ problems? and (no|\d+) warnings?\.$", words)
    assert "\x1b[1;31mproblem" in command.text
    lines = re.sub(r"\x1b\[[\d;]*m|\r", "", command.text).split("\n")
    assert max(map(len, lines)) <= width
