"""Scripts as the launcher runs them, and the processes that scripts fork."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gang import Seat, run_gang
from benchmarks.script import Scripts, Trouble, answer_of, environment_of_scripts, script_command
from benchmarks.told import answer, read_order, reading
from command import await_condition


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path, stop=lambda: False)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def standing_in(folder: Path) -> list[str]:
    """Processes whose working folder it is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.joinpath("cwd").readlink() == folder:
                found.append(entry.joinpath("cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_script_answers_with_its_last_line_of_json(scripts: Scripts) -> None:
    assert scripts.run(python("print('noise'); print('{\"a\": 1}')")) == {"a": 1}


def test_a_script_that_fails_is_told_by_its_last_words(scripts: Scripts) -> None:
    assert scripts.run(python("raise SystemExit('no such thing')")) == Trouble(
        "its script ended with code 1: no such thing"
    )


def test_a_script_that_was_killed_or_said_nothing_is_told_so() -> None:
    assert answer_of(-9, "", "") == Trouble("its script was killed by signal 9: it said nothing")
    assert answer_of(0, "no json\n", "hm\n") == Trouble("its script ended with code 0: hm")


def test_a_script_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    hanging = python("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")
    assert Scripts(tmp_path, stop=lambda: False, limit=0.5).run(hanging) == Trouble("it took longer than 0.5 s")
    assert standing_in(tmp_path) == []


@pytest.mark.parametrize("who", ["the script", "a process of it"])
def test_an_end_by_the_user_ends_those_who_do_not_want_to(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.script.PATIENCE", 0.2)
    stubborn = ["sh", "-c", "trap '' TERM; touch here; sleep 600"]
    child = python(f"import subprocess, time; subprocess.Popen({stubborn}); time.sleep(600)")
    scripts = Scripts(tmp_path, stop=(tmp_path / "here").exists)
    assert scripts.run(stubborn if who == "the script" else child) == Trouble("interrupted")
    assert standing_in(tmp_path) == []


def test_scripts_have_one_thread_and_no_variable_that_changes_a_job() -> None:
    found = environment_of_scripts(
        {"QUORATE_WORKERS": "9", "OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": "8", "HOME": "/"}
    )
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["HOME"] == "/"
    assert not {"QUORATE_WORKERS", "OMP_THREAD_LIMIT"} & found.keys()


def test_what_scripts_write_goes_to_the_folder(scripts: Scripts) -> None:
    code = "import json, os, tempfile; print(json.dumps([os.getcwd(), tempfile.gettempdir()]).join(['{\"a\": ', '}']))"
    assert scripts.run(python(code)) == {"a": [str(scripts.folder), str(scripts.folder)]}


def test_a_module_of_the_package_runs_with_any_interpreter(scripts: Scripts) -> None:
    # A module that takes no order: what matters is that it is found, and by which name.
    assert scripts.run(script_command(sys.executable, "benchmarks.no_such_script", {})) == Trouble(
        "its script ended with code 1: ImportError: No module named benchmarks.no_such_script"
    )
    command = script_command("/some/python", "benchmarks.own.step", {"a": 1}, ("mpirun", "-n", "2"))
    assert command[:4] == ["mpirun", "-n", "2", "/some/python"]
    assert command[-2:] == ["benchmarks.own.step", '{"a": 1}']


def test_an_order_is_read_and_answered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["script", '{"sizes": [4]}'])
    assert read_order() == {"sizes": [4]}
    answer(reading("1 KB", 2, [1.23456789], size=1024))
    assert answer_of(0, capsys.readouterr().out, "") == {
        "readings": [{"case": "1 KB", "processes": 2, "ms": [1.234568], "bytes": 1024, "threads": 1, "details": {}}]
    }


def test_a_gang_hears_each_other_and_gives_its_results_in_order() -> None:
    def play(seat: Seat) -> Any:
        heard = seat.gather(f"I am {seat.position}")
        return [seat.position, seat.gather(len(heard))]

    assert run_gang(3, play) == [[0, [3, 3, 3]], [1, [3, 3, 3]], [2, [3, 3, 3]]]


def test_results_larger_than_a_message_come_whole() -> None:
    assert run_gang(2, lambda seat: [seat.position] * 100_000) == [[0] * 100_000, [1] * 100_000]


def test_one_that_fails_ends_the_gang_with_its_reason(tmp_path: Path) -> None:
    def play(seat: Seat) -> None:
        os.chdir(tmp_path)
        if seat.position == 1:
            raise ValueError("what a pity")
        seat.gather("waiting for somebody who will not come")

    with pytest.raises(SystemExit, match="process 1 of 2: ValueError: what a pity"):
        run_gang(2, play)
    assert standing_in(tmp_path) == []


def test_one_that_is_killed_ends_the_gang(tmp_path: Path) -> None:
    def play(seat: Seat) -> None:
        os.chdir(tmp_path)
        if seat.position == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(SystemExit, match="process 0 of 2: it has ended without a word"):
        run_gang(2, play)
    await_condition("the end of all processes", lambda: not standing_in(tmp_path))
