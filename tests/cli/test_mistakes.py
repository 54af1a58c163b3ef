import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import Workplace


@pytest.mark.parametrize(
    ("keys", "arguments", "words"),
    [
        ({"batchsize": 8}, [], ["batchsize", "batch_size"]),
        ({"lanes": "four"}, [], ["lanes", '"four"', "whole number"]),
        ({}, ["--workers", "5"], ["workers", "5 workers cannot share 4 lanes", "5 > 4"]),
        ({"batch_size": 3}, [], ["batch_size", "3 < 4"]),
        ({"task": "tsk.py:Tiny"}, [], ["there is no file", "tsk.py", "Did you mean task.py?"]),
        ({}, ["--set", "checkpoint.evry=3"], ["checkpoint.evry", "every"]),
        ({"steps": None}, [], ["neither epochs nor steps"]),
    ],
)
def test_a_mistake_in_the_job_is_told_without_a_traceback(
    workplace: Workplace, keys: dict[str, Any], arguments: list[str], words: list[str]
) -> None:
    workplace.write_job(**keys)
    done = workplace.train(*arguments, "--json")
    assert (done.code, done.document["status"], done.document["exit_code"]) == (2, "refused", 2)
    assert done.document["error"] == done.error
    for word in words:
        assert word in done.error
    assert "Traceback" not in done.stderr
    assert workplace.runs() == []


def test_mistakes_on_the_command_line_are_told_with_the_nearest_word(workplace: Workplace) -> None:
    missing = workplace.run("train", "jbo.yaml")
    assert (missing.code, missing.stdout) == (2, "")
    assert "there is no job file jbo.yaml" in missing.error
    assert "job.yaml" in missing.error
    option = workplace.train("--wrkers", "2", "--json")
    assert (option.code, option.document["status"]) == (2, "refused")
    assert "--workers" in option.document["error"]
    assert "Usage: " in option.stderr


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task": "task.py:Tinny"}, ["has no class Tinny", "Did you mean Tiny?"]),
        ({"params": {"learning_rat": 0.1}}, ["params.learning_rat", "learning_rate"]),
    ],
)
def test_a_mistake_that_shows_in_the_task_leaves_no_run_behind(
    workplace: Workplace, keys: dict[str, Any], words: list[str]
) -> None:
    workplace.write_job(**keys)
    done = workplace.train()
    assert (done.code, done.stdout) == (2, "")
    for word in words:
        assert word in done.error
    assert "Traceback" not in done.stderr
    assert workplace.runs() == []


def test_a_port_in_use_is_told_at_once(workplace: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workplace.write_job(port=port)
        done = workplace.train()
    assert (done.code, done.stdout) == (2, "")
    assert done.error == f"port {port} on 127.0.0.1 is in use; choose another with `port`, or 0 for any free one"
    assert workplace.runs() == []


def test_a_run_folder_that_cannot_be_made_is_told(workplace: Workplace) -> None:
    (workplace.folder / "runs").write_text("a file is in the way")
    done = workplace.train()
    assert (done.code, done.stdout) == (2, "")
    assert "cannot make a run folder in" in done.error
    assert "`runs`" in done.error
    assert "Traceback" not in done.stderr


def test_a_loss_that_is_none_is_told_with_step_and_lane(workplace: Workplace) -> None:
    done = workplace.train("--workers", "2", "--json", TROUBLE="nan")
    assert (done.code, done.document["status"]) == (1, "failed")
    assert "not finite (nan) at step" in done.error
    assert "Traceback" not in done.stderr
    failure = done.document["failure"]
    assert failure["step"] == 5
    assert "step 5" in failure["message"]
    assert "lane " in failure["message"]
    assert done.document["run"] == "tiny-0001"


def test_a_resume_without_runs(workplace: Workplace) -> None:
    none = workplace.run("resume", "last", "--json")
    assert (none.code, none.document["status"]) == (2, "refused")
    assert "there are no runs" in none.error


def test_what_a_resume_of_a_finished_run_refuses(used_workplace: Workplace) -> None:
    workplace = used_workplace
    for arguments, words in [
        (["last"], ["run tiny-0001 is complete (8 steps)", "quorate resume tiny-0001 --steps 16"]),
        (["tiny", "--seed", "3"], ["seed: 0 → 3", "--branch"]),
        (["last", "--set", "params.learning_rate=0.5"], ["params.learning_rate: not given → 0.5"]),
        (["last", "--steps", "4"], ["steps: 8 → 4"]),
        (["tinny"], ["there is no run 'tinny'", "did you mean tiny-0001?"]),
    ]:
        done = workplace.run("resume", *arguments)
        assert (done.code, done.stdout) == (2, ""), done
        for word in words:
            assert word in done.error
        assert "Traceback" not in done.stderr

    for checkpoint in (workplace.last / "checkpoints").iterdir():
        (checkpoint / "state.safetensors").unlink()
    empty = workplace.run("resume", "last", "--steps", "10")
    assert empty.code == 2
    assert "none of its checkpoints is whole" in empty.error
    assert workplace.runs() == [workplace.last]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leaving: int = 0) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(max(0, free - leaving)))


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_disk_that_is_full_before_and_during_the_job(workplace: Workplace) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        fill(workplace.folder / "runs")
        before = workplace.train("--json")
        assert (before.code, before.document["status"]) == (1, "failed")
        assert "No space left on device" in before.error
        assert before.error.count("\n") == 0
        assert workplace.runs() == []

        (workplace.folder / "runs" / "ballast").unlink()
        workplace.write_job(steps=400)
        running = workplace.start("train", "job.yaml", "--workers", "2", "--json", PAUSE="0.02")
        running.await_event("checkpoint", at_least=2)
        fill(workplace.folder / "runs")
        done = running.done()
        assert done.code == 1
        assert "cannot save checkpoint" in done.error
        assert "No space left on device" in done.error
        assert done.error.count("\n") == 0
        workplace.assert_nobody_left()

        (workplace.folder / "runs" / "ballast").unlink()
        resumed = workplace.start("resume", "last", "--json")
        resumed.await_event("generation")
        resumed.process.send_signal(signal.SIGTERM)
        assert resumed.done().document["status"] == "terminated"  # so the checkpoints before were whole


def test_an_unwritable_run_folder_on_a_disk_that_is_read_only(workplace: Workplace) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        subprocess.run(["mount", "-o", "remount,ro", str(workplace.folder / "runs")], check=True)
        done = workplace.train("--json")
    assert (done.code, done.document["status"]) == (2, "refused")
    assert "Read-only file system" in done.error
