import json
import os
import re
import signal

import pytest

import schemas
from command import Workplace, await_condition, in_step
from quorate.storage.run_folder import RunFolder

SECRET = "hunter2-and-more"

PRINTING = """
import os, sys
import logging

def speak(step):
    print("step", step, os.environ.get("DB_PASSWORD"))
    os.write(2, b"\\x1b[2J binary \\xff\\n")
    os.system("echo from a child")
    logging.getLogger("mine").warning("%s of %s", "a warning", "the task")
"""


@pytest.fixture
def speaking(workplace: Workplace) -> Workplace:
    task = workplace.task.read_text()
    task = task.replace("class Tiny(quorate.Task):", f"{PRINTING}\n\nclass Tiny(quorate.Task):")
    workplace.task.write_text(
        task.replace("        calls = next(CALLS)\n", "        calls = next(CALLS)\n        speak(calls)\n")
    )
    return workplace


def test_what_all_processes_log_and_print_is_shown_in_order_and_masked(speaking: Workplace) -> None:
    done = speaking.train("--workers", "2", "--set", "loader_workers=1", DB_PASSWORD=SECRET)
    assert done.code == 0, done.stderr
    shown = speaking.run("logs", "last", "--json")
    schemas.validate("logs", shown.document)
    records = shown.document["records"]
    assert {"launcher", "coordinator", "fork server", "worker 0", "worker 1"} <= {each["process"] for each in records}
    # A line that came late into its file stands after those before it there.
    orders, newest = [], dict[str, float]()
    for each in records:
        newest[each["process"]] = max(newest.get(each["process"], 0.0), each["time"])
        orders.append(newest[each["process"]])
    assert orders == sorted(orders)
    prints = [each for each in records if each.get("source") == "stdout" and each["message"].startswith("step ")]
    assert {each["worker"] for each in prints} == {0, 1}
    assert all(each["message"].endswith("***") for each in prints)
    assert {each["generation"] for each in prints if "step" in each} == {"1.1"}
    warning = next(each for each in records if each.get("logger") == "mine")
    assert (warning["message"], warning["level"]) == ("a warning of the task", "warning")
    assert warning["step"] >= 0
    assert any(each["message"] == "from a child" for each in records)

    text = speaking.run("logs", "last").stdout
    assert "\\x1b[2J binary \\xff" in text
    assert "\x1b" not in text
    line = next(line for line in text.splitlines() if "a warning of the task" in line)
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  worker \d +warning  a warning of the task", line)
    assert "\x1b[33ma warning" in speaking.run("logs", "last", FORCE_COLOR="1").stdout

    only = speaking.run("logs", "last", "--worker", "1", "--level", "warning", "--grep", "OF THE", "--json").document
    assert {(each["worker"], each["message"]) for each in only["records"]} == {(1, "a warning of the task")}
    for file in speaking.last.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_following_ends_with_the_job(speaking: Workplace) -> None:
    running = speaking.start("train", "job.yaml", "--workers", "1", HOLD=in_step(3, workers=1))
    running.await_event("step", at_least=2)
    following = speaking.start("logs", "last", "-f")
    assert following.process.stdout is not None
    first = next(line for line in following.process.stdout if "takes part in generation" in line)
    assert " worker 0 " in first
    speaking.go()
    assert running.done().code == 0
    rest = following.done()
    assert rest.code == 0
    # Not always the last line: what others have logged just before may be read a look later.
    end = "launcher          info     the job ends: complete"
    assert [line for line in rest.stdout.splitlines() if line.endswith(end)]


def test_what_a_worker_printed_before_it_was_killed_is_there(speaking: Workplace) -> None:
    running = speaking.start("train", "job.yaml", "--workers", "2", HOLD=in_step(3, workers=2))
    running.await_event("step", at_least=2)
    last = max(await_condition("its words", lambda: calls(speaking, 1)))
    victim = next(each["pid"] for each in speaking.log_records("worker-1"))
    os.kill(victim, signal.SIGKILL)
    running.await_event("lost")

    def is_replaced() -> bool:
        said = [each["message"] for each in speaking.log_records("coordinator")]
        return sum("worker 1 has registered" in message for message in said) == 2

    # Or the other may have come to the end of the job before there is one.
    await_condition("another in its place", is_replaced)
    speaking.go()
    assert running.done().code == 0
    assert max(calls(speaking, 1, victim)) >= last
    assert {each["pid"] for each in speaking.log_records("worker-1")} - {victim}, "its replacement logs there, too"


def calls(place: Workplace, worker: int, pid: int | None = None) -> list[int]:
    records = [each for each in place.log_records(f"worker-{worker}") if pid in (None, each["pid"])]
    found = (re.match(r"step (\d+) ", each["message"]) for each in records)
    return [int(match[1]) for match in found if match]


def test_old_text_logs_and_an_empty_folder_are_read(workplace: Workplace) -> None:
    run = RunFolder.create(workplace.folder / "runs", "tiny")
    assert workplace.run("logs", "last").stdout == ""
    assert workplace.run("logs", "last", "-f", "--json").document == {"run": "tiny-0001", "records": []}
    (run.logs / "worker-0.log").write_text("2026-01-02 03:04:05,678 INFO quorate.worker: hello\n")
    assert workplace.run("logs", "last").stdout == "01-02 03:04:05.678  worker 0          info     hello\n"


def test_a_worker_that_there_is_none_of_is_refused(workplace: Workplace) -> None:
    run = RunFolder.create(workplace.folder / "runs", "tiny")
    for name in ("worker-0.jsonl", "worker-1.jsonl", "worker-1.jsonl.1"):
        (run.logs / name).touch()
    done = workplace.run("logs", "last", "--worker", "9")
    assert (done.code, done.error) == (2, "run tiny-0001 has no worker 9: it has logs of workers 0 and 1")


def test_a_level_that_is_none_is_refused(workplace: Workplace) -> None:
    RunFolder.create(workplace.folder / "runs", "tiny")
    done = workplace.run("logs", "last", "--level", "warn")
    assert done.code == 2
    assert "Did you mean warning?" in done.error


def test_a_secret_in_a_failure_is_masked_everywhere(workplace: Workplace) -> None:
    task = workplace.task.read_text()
    raising = "raise ValueError(f\"cannot log in with {os.environ['DB_PASSWORD']}\")"
    workplace.task.write_text(task.replace('get_into_trouble("loss")', raising))
    done = workplace.train("--json", "--workers", "2", DB_PASSWORD=SECRET)
    assert done.code == 1
    assert "cannot log in with ***" in done.document["error"]
    assert SECRET not in done.stdout + done.stderr
    (failure,) = workplace.failures()
    assert "cannot log in with ***" in failure["message"]
    for file in workplace.last.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert SECRET not in workplace.run("show", "last", "--json").stdout


def test_a_parameter_that_is_secret_is_kept_for_its_owner_and_never_shown(workplace: Workplace) -> None:
    task = workplace.task.read_text()
    workplace.task.write_text(
        task.replace("learning_rate: float = 0.01", 'learning_rate: float = 0.01\n    api_key: str = ""')
    )
    workplace.write_job(params={"api_key": "0123456789abcdef"})
    assert workplace.train().code == 0
    assert (workplace.last / "job.yaml").stat().st_mode & 0o077 == 0
    for verb in (["show", "last"], ["show", "last", "--json"], ["logs", "last"]):
        assert "0123456789abcdef" not in workplace.run(*verb).stdout
    exposed = [
        file for file in workplace.last.rglob("*") if file.is_file() and b"0123456789abcdef" in file.read_bytes()
    ]
    assert {file.name for file in exposed} <= {"job.yaml", "manifest.json"}
    assert json.loads(workplace.run("resume", "last", "--steps", "10", "--json").stdout)["status"] == "complete"
