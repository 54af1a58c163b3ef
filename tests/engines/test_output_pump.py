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
from quorate.engines.output_pump import OutputPipes, OutputPump, Speaker
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


def start(pump: OutputPump, code: str, slot: int = 0) -> tuple[subprocess.Popen[bytes], OutputPipes]:
    """A process as a worker, whose output the pump reads."""
    pipes = OutputPipes()
    stdout, stderr = pipes.write_ends
    process = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=stderr)
    pipes.close_write_ends()
    pipes.send(pump.control, Speaker.worker(slot, process.pid, "token-of-the-job"))
    return process, pipes


def records(run: RunFolder, log: str = "worker-0") -> list[dict[str, Any]]:
    lines = [line for part in parts_of(run.logs / f"{log}.jsonl") for line in part.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def messages(run: RunFolder, source: str, log: str = "worker-0") -> list[str]:
    return [record["message"] for record in records(run, log) if record.get("source") == source]


def test_what_was_printed_before_a_sigkill_is_in_the_log(run: RunFolder, pump: OutputPump) -> None:
    code = "import os, signal, sys\nfor n in range(2000): print('line', n, flush=True)\n"
    code += "os.write(2, b'no end of line'); os.kill(os.getpid(), signal.SIGKILL)"
    process, pipes = start(pump, code)
    assert process.wait(60) == -signal.SIGKILL
    pipes.close()
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
    process, pipes = start(pump, code)
    assert process.wait(60) == -signal.SIGSEGV
    pipes.close()
    pump.close()
    assert messages(run, "stdout") == ["python", "child", "from C"]
    assert messages(run, "stderr") == ["worse"]


def test_secrets_never_reach_a_file_however_they_are_written(run: RunFolder, pump: OutputPump) -> None:
    halves = [SECRET[:5], SECRET[5:]]
    code = (
        f"import os, sys, time\nfor piece in {[*halves, ' and ', *'token-of-the-job']!r}:\n"
        "    os.write(1, piece.encode()); time.sleep(0.005)\n"  # so that they are read one by one
    )
    process, pipes = start(pump, code)
    process.wait(60)
    pipes.close()
    pump.close()
    assert messages(run, "stdout") == ["*** and ***"]
    everything = b"".join(file.read_bytes() for file in run.logs.iterdir())
    assert SECRET.encode() not in everything


def test_another_pump_takes_over_and_whoever_prints_does_not_notice(
    run: RunFolder, pump: OutputPump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pump, "RESTART_AFTER", 0.0)
    code = "import sys\nprint('before', flush=True); sys.stdin.readline()\nfor n in range(20000): print('after', n)"
    pipes = OutputPipes()
    stdout, stderr = pipes.write_ends
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    pipes.close_write_ends()
    speaker = Speaker.worker(0, process.pid, "token-of-the-job")
    pipes.send(pump.control, speaker)
    await_condition("the first line", lambda: (run.logs / "worker-0.jsonl").exists() and records(run))
    pump._process.kill()
    pump._process.wait()
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    assert pump.look()
    pipes.send(pump.control, speaker)
    assert process.wait(60) == 0
    pipes.close()
    pump.close()
    assert messages(run, "stdout") == ["before", *(f"after {number}" for number in range(20000))]


def test_the_log_of_one_that_prints_without_end_is_bounded_and_has_its_last_words(
    run: RunFolder, pump: OutputPump
) -> None:
    code = (
        "import os\nblock = (b'x' * 99 + b'\\n') * 10000\n"
        "for _ in range(60): os.write(1, block)\n"
        "os.write(1, b'the last words\\n')"
    )
    process, pipes = start(pump, code)
    assert process.wait(100) == 0
    pipes.close()
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
    process, pipes = start(pump, code, slot=3)
    process.wait(60)
    pipes.close()
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
    process, pipes = start(pump, code)
    process.wait(60)
    pipes.close()
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
    process, pipes = start(pump, "import os, time; print('there', flush=True); time.sleep(600)")
    await_condition("it", lambda: (run.logs / "worker-0.jsonl").exists() and records(run))
    pump.control.close()
    pump._theirs.close()
    assert pump._process.wait(60) == 0
    process.kill()
    process.wait()
    pipes.close()
    assert messages(run, "stdout") == ["there"]


def test_pipes_of_a_process_are_not_left_open(run: RunFolder, pump: OutputPump) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(5):
        process, pipes = start(pump, "print('hello')")
        process.wait(60)
        pipes.close()
    assert descriptors() == before
    await_condition("the pump's own", lambda: len(os.listdir(f"/proc/{pump._process.pid}/fd")) < 12)  # noqa: PTH208


def test_a_copy_of_its_socket_with_somebody_else_keeps_no_pump(run: RunFolder, pump: OutputPump) -> None:
    with pump.control.dup():
        began = time.monotonic()
        pump.close()
        assert time.monotonic() - began < 20, "it waits for nobody"


def test_it_ends_with_the_launcher_whoever_else_has_its_socket(run: RunFolder) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from quorate.engines.output_pump import OutputPump;"
        "from quorate.storage.run_folder import RunFolder;"
        "pump = OutputPump(RunFolder(Path(sys.argv[1])));"
        "left = os.fork() or (os.close(1), signal.pause());"
        "print(pump._process.pid, left, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    launcher = subprocess.run([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, timeout=PATIENCE)
    pump, left = map(int, launcher.stdout.split())
    try:
        await_condition("its end", lambda: is_dead(pump))
    finally:
        os.kill(left, signal.SIGKILL)


def is_dead(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
