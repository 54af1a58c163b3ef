import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from catalogue import machine
from command import Workplace


def test_a_port_in_use_is_told_at_once(workplace: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workplace.write_job(port=port)
        done = workplace.train("--json")
    assert f"port {port} on 127.0.0.1 is in use" in done.error
    machine.PAGE.hold(machine.PORT, done, workplace)
    assert workplace.runs() == []


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
        machine.PAGE.hold(machine.FULL_BEFORE, before, workplace)
        assert workplace.runs() == []

        (workplace.folder / "runs" / "ballast").unlink()
        workplace.write_job(steps=400)
        running = workplace.start("train", "job.yaml", "--workers", "2", "--json", PAUSE="0.02")
        running.await_event("checkpoint", at_least=2)
        fill(workplace.folder / "runs")
        done = running.done()
        machine.PAGE.hold(machine.FULL_LATER, done, workplace, somewhere=True)
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
    machine.PAGE.hold(machine.READ_ONLY, done, workplace)
