"""A real pump, and real processes that print into it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from command import PATIENCE, await_condition
from quorate.core.masking import register_secrets
from quorate.engines import output_pump
from quorate.engines.output_pump import OutputPump, Pipes, close_all
from quorate.storage.log_file import parts_of
from quorate.storage.run_folder import RunFolder

SECRET = "a-very-secret-word"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "tiny-0001")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def pump(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutputPump]:
    monkeypatch.setattr(output_pump, "CLOSE_PATIENCE", PATIENCE)
    register_secrets([SECRET])
    pump = OutputPump(run)
    yield pump
    pump.close()


def start(pump: OutputPump, code: str, slot: int = 0) -> subprocess.Popen[bytes]:
    """A process as a worker, whose output the pump reads."""
    pipes = Pipes.open()
    stdout, stderr = pipes.write_ends
    process = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=stderr)
    close_all(pipes.write_ends)
    pump.read(pipes, process.pid, slot, ["token-of-the-job"])
    return process


def records(run: RunFolder, log: str = "worker-0") -> list[dict[str, Any]]:
    lines = [line for part in parts_of(run.logs / f"{log}.jsonl") for line in part.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def messages(run: RunFolder, source: str, log: str = "worker-0") -> list[str]:
    return [record["message"] for record in records(run, log) if record.get("source") == source]


def test_what_was_printed_before_a_sigkill_is_in_the_log(run: RunFolder, pump: OutputPump) -> None:
    code = "import os, signal, sys\nfor n in range(2000): print('line', n, flush=True)\n"
    code += "os.write(2, b'no end of line'); os.kill(os.getpid(), signal.SIGKILL)"
    process = start(pump, code)
    assert process.wait(60) == -signal.SIGKILL
    pump.close()
    assert messages(run, "stdout") == [f"line {number}" for number in range(2000)]
    assert messages(run, "stderr") == ["no end of line"]
    record = records(run)[0]
    assert (record["process"], record["worker"], record["pid"]) == ("worker 0", 0, process.pid)
    assert (record["level"], record["run"]) == ("info", "tiny-0001")


def test_a_segfault_loses_nothing_and_c_code_and_children_are_heard(run: RunFolder, pump: OutputPump) -> None:
    code = (
        "import ctypes, os, sys; print('python', flush=True); os.system('echo child; echo worse >&2');"
        "libc = ctypes.CDLL(None); libc.puts(b'from C'); libc.fflush(None); ctypes.string_at(0)"
    )
    process = start(pump, code)
    assert process.wait(60) == -signal.SIGSEGV
    pump.close()
    assert messages(run, "stdout") == ["python", "child", "from C"]
    assert messages(run, "stderr") == ["worse"]


def test_secrets_never_reach_a_file_however_they_are_written(run: RunFolder, pump: OutputPump) -> None:
    halves = [SECRET[:5], SECRET[5:]]
    code = (
        f"import os, sys, time\nfor piece in {[*halves, ' and ', *'token-of-the-job']!r}:\n"
        "    os.write(1, piece.encode()); time.sleep(0.005)\n"  # so that they are read one by one
    )
    process = start(pump, code)
    process.wait(60)
    pump.close()
    assert messages(run, "stdout") == ["*** and ***"]
    everything = b"".join(file.read_bytes() for file in run.logs.iterdir())
    assert SECRET.encode() not in everything


def test_the_log_of_one_that_prints_without_end_is_bounded_and_has_its_last_words(
    run: RunFolder, pump: OutputPump
) -> None:
    code = (
        "import os\nblock = (b'x' * 99 + b'\\n') * 10000\n"
        "for _ in range(60): os.write(1, block)\n"
        "os.write(1, b'the last words\\n')"
    )
    process = start(pump, code)
    assert process.wait(100) == 0
    pump.close()
    parts = list(parts_of(run.logs / "worker-0.jsonl"))
    assert len(parts) <= 4
    assert sum(part.stat().st_size for part in parts) < 80 * 2**20
    last = json.loads(parts[-1].read_bytes().rpartition(b"\n{")[2].join([b"{", b""]))
    assert last["message"] == "the last words"


def test_records_go_as_they_are_and_say_where_prints_belong(run: RunFolder, pump: OutputPump) -> None:
    code = (
        "from quorate.core.log_records import Place, log_by_stderr\nimport logging, os, sys\n"
        "log_by_stderr(Place('worker 3', 'tiny-0001', 3, lambda: {'generation': '1.2', 'step': 7}), 'info')\n"
        f"logging.getLogger('mine').warning('mind the %s', {SECRET!r})\n"
        "os.close(2)\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.exception('no good')\n"
        "print('printed')\n"
    )
    process = start(pump, code, slot=3)
    process.wait(60)
    pump.close()
    warning, error, printed = sorted(records(run, "worker-3"), key=order_of)
    assert warning["message"] == "mind the ***"
    fields: Mapping[str, Any] = {"level": "warning", "logger": "mine", "process": "worker 3", "generation": "1.2"}
    assert warning.items() >= fields.items()
    assert error["exception"].endswith("ZeroDivisionError: division by zero")
    assert (printed["message"], printed["worker"]) == ("printed", 3)


def test_printed_lines_have_their_lane_and_states_of_a_bar_say_that_they_were_written_over(
    run: RunFolder, pump: OutputPump
) -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----"
    code = (
        "from quorate.core.log_records import Place, log_by_stderr\n"
        "import logging, sys, warnings\n"
        "place = Place('worker 0', 'tiny-0001', 0)\nlog_by_stderr(place, 'info')\n"
        "print('before')\n"
        "place.lane = lambda: 2\n"
        f"print('two\\n\\nlines', {key!r})\n"
        "for state in ('0%', '50%', '100%\\n'): print('\\r ' + state, end='', file=sys.stderr)\n"
        "print('\\r 7%', end='', file=sys.stderr, flush=True); warnings.warn('mind')\n"
        "print('\\r 8%', file=sys.stderr)\n"
        "own = logging.getLogger('own'); own.addHandler(logging.StreamHandler()); own.warning('once')\n"
    )
    process = start(pump, code)
    process.wait(60)
    pump.close()
    told = [(each["message"], each.get("lane"), each.get("source")) for each in records(run)]
    assert [each[:2] for each in told if each[2] == "stdout"] == [
        ("before", None),
        ("two", 2),
        ("", None),
        ("lines ***", 2),
    ]
    states = [
        (each["message"], each["lane"], each.get("overwritten")) for each in records(run) if "%" in each["message"]
    ]
    assert states == [(" 0%", 2, True), (" 50%", 2, True), (" 100%", 2, None), (" 7%", 2, True), (" 8%", 2, None)]
    warning, printed, logged = (each for each in records(run) if "mind" in each["message"] or each["message"] == "once")
    assert (warning["level"], warning["logger"], warning["lane"]) == ("warning", "py.warnings", 2)
    assert (logged["printed"], printed["source"]) == (True, "stderr")


def order_of(record: dict[str, Any]) -> tuple[bool, float]:
    return "source" in record, record["time"]


def test_a_process_in_the_background_that_keeps_its_pipe_does_not_keep_the_pump(
    run: RunFolder, pump: OutputPump
) -> None:
    process = start(pump, "import os, time; print('there', flush=True); time.sleep(600)")
    await_condition("it", lambda: (run.logs / "worker-0.jsonl").exists() and records(run))
    pump.close()
    assert not pump._thread.is_alive()
    process.kill()
    process.wait()
    assert messages(run, "stdout") == ["there"]


def test_pipes_of_a_process_are_not_left_open(run: RunFolder) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    pump = OutputPump(run)
    for _ in range(5):
        start(pump, "print('hello')").wait(60)
    await_condition("the pump's own", lambda: not pump._streams)
    pump.close()
    assert descriptors() == before


def test_a_copy_of_its_pipe_with_a_fork_keeps_no_pump(run: RunFolder, pump: OutputPump) -> None:
    copy = os.dup(pump._wake)
    began = time.monotonic()
    pump.close()
    os.close(copy)
    assert not pump._thread.is_alive()
    assert time.monotonic() - began < 20, "it waits for nobody"
