import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import quorate
from catalogue import machine
from command import Done, Workplace, await_condition
from quorate.cli.app import app
from quorate.core.errors import RequestError
from quorate.observe.events import LogMessage
from quorate.observe.jsonl import EventTail
from small_disk import small_disk


def test_a_port_in_use_is_told_at_once(workplace: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workplace.write_job(port=port)
        done = workplace.train("--json")
    assert f"port {port} on 127.0.0.1 is in use" in done.error
    machine.PAGE.hold(machine.PORT, done, workplace)
    assert workplace.runs() == []


@pytest.mark.usefixtures("namespaces_allowed", "unmeasured")
def test_a_machine_without_loopback_is_told_before_a_process_is_started(workplace: Workplace) -> None:
    train = [sys.executable, "-m", "quorate", "train", "job.yaml", "--json"]
    done = subprocess.run(
        ["unshare", "--net", *train], cwd=workplace.folder, capture_output=True, text=True, check=False
    )
    machine.PAGE.hold(machine.NO_LOOPBACK, Done(done.returncode, done.stdout, done.stderr), workplace)
    assert workplace.runs() == []


def test_a_folder_that_was_removed_under_the_command_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for verb in (["runs"], ["show", "last"], ["init"], ["train", "job.yaml"], ["doctor"], ["diff", "a", "b"]):
        with pytest.raises(RequestError, match=r"the folder in which this was typed can no longer be found .* cd ~"):
            app(verb, standalone_mode=False)
    source = str(Path(quorate.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quorate", "runs", "--json"],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the folder in which this was typed")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["status"] == "refused"


def test_a_result_that_cannot_be_printed_is_not_lost(used_workplace: Workplace) -> None:
    with Path("/dev/full").open("w") as full:
        done = used_workplace.run_into(full, "resume", "last", "--steps", "9", "--workers", "1", "--json", "--quiet")
    result = used_workplace.last / "result.json"
    told = f"error: cannot write to standard output: No space left on device. The result is in {result}.\n"
    assert (done.code, done.stderr) == (1, told)
    assert used_workplace.result()["steps"] == 9


@pytest.mark.parametrize("arguments", [["show", "last"], ["runs", "--json"], ["--help"], ["resume", "no", "--json"]])
def test_a_reader_that_has_seen_enough_is_nothing_to_tell_of(used_workplace: Workplace, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = used_workplace.run_into(closed, *arguments)
    if "resume" in arguments:
        assert (done.code, done.error.partition(" ")[0]) == (2, "there"), "a mistake is one, whoever hears of it"
    else:
        assert (done.code, done.stderr) == (0, "")


def test_a_standard_output_that_is_closed_is_not_taken_for_a_file_of_ours(used_workplace: Workplace) -> None:
    done = used_workplace.run_into(None, "runs", "--json")
    assert (done.code, done.stderr) == (0, "")


class Listener:
    """Reads what a command says on standard error, while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self._stderr, self._heard = process.stderr.fileno(), b""
        os.set_blocking(self._stderr, False)

    def await_line(self, words: str) -> None:
        def has_heard() -> bool:
            with suppress(BlockingIOError):
                self._heard += os.read(self._stderr, 65536)
            return words.encode() in self._heard

        await_condition(f"{words!r}", has_heard)


def fill(folder: Path, leaving: int = 0) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(max(0, free - leaving)))


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_disk_that_is_full_before_the_job(workplace: Workplace) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        fill(workplace.folder / "runs")
        before = workplace.train("--json")
        machine.PAGE.hold(machine.FULL_BEFORE, before, workplace)
        assert workplace.runs() == []


@pytest.mark.long  # the last checkpoint is tried for a minute
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_disk_that_becomes_full_and_stays_so(workplace: Workplace) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        workplace.write_job(steps=60, evaluate={"every": "end"})
        running = workplace.start("train", "job.yaml", "--workers", "2", "--json", PAUSE="0.02")
        running.await_event("checkpoint", at_least=2)
        fill(workplace.folder / "runs")
        done = running.done()
        assert (done.code, done.document["status"]) == (1, "failed")
        assert "cannot save checkpoint step-00000060-evaluated" in done.error
        assert "No space left on device" in done.error
        assert "not saved at step" in done.stderr, "the others were not worth ending the job for"
        workplace.assert_nobody_left()

        (workplace.folder / "runs" / "ballast").unlink()
        with (workplace.folder / "told").open("w") as told:
            resumed = workplace.run_into(told, "resume", "last", "--json")
        assert resumed.code == 0, resumed.stderr  # so the checkpoints before were whole
        assert [path.name for path in workplace.last.glob("checkpoints/.*")] == []


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_is_told_while_it_is_and_what_is_missing_afterwards(
    workplace: Workplace,
) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        workplace.write_job(steps=4000, checkpoint=None)
        running = workplace.start("train", "job.yaml", "--workers", "1", "--json", PAUSE="0.02")
        told = Listener(running.process)
        running.await_event("step", at_least=2)
        fill(workplace.folder / "runs")
        told.await_line(f"cannot write in {workplace.last}: No space left on device. Training continues, unseen")
        (workplace.folder / "runs" / "ballast").unlink()
        told.await_line("missing here: events.jsonl could not be written (No space left on device)")
        running.process.send_signal(signal.SIGTERM)
        assert running.done().code == 143
        assert workplace.result()["status"] == "terminated"
        assert workplace.checkpoints()[-1].startswith(f"step-{workplace.result()['steps']:08}")
        events = EventTail(workplace.last / "events.jsonl")
        logged = [event.message or "" for event in events if isinstance(event, LogMessage)]
        assert ["events are missing here" in message for message in logged] == [True]
        workplace.assert_nobody_left()


def test_an_unwritable_run_folder_on_a_disk_that_is_read_only(workplace: Workplace) -> None:
    with small_disk(workplace.folder / "runs", "256k"):
        subprocess.run(["mount", "-o", "remount,ro", str(workplace.folder / "runs")], check=True)
        done = workplace.train("--json")
    machine.PAGE.hold(machine.READ_ONLY, done, workplace)
