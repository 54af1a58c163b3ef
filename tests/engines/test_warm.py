"""What is forked in place of a new interpreter is to its program what a new one would be."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import coverage
import pytest

from command import await_condition, command_line
from warm import SCRIPT, SPARES, cold, drop_damaged_measurements

FACTS = """
import json, os, signal, sys, tempfile, threading
if __name__ == "__main__":
    told = sys.stdin.read()
    facts = {
        "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "told": told, "threads": threading.active_count(),
        "environment": {name: value for name, value in os.environ.items() if name != "_"},
        "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "temporary": tempfile.gettempdir(),
        "interrupt": str(signal.getsignal(signal.SIGINT)), "terminate": str(signal.getsignal(signal.SIGTERM)),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "handles": sorted(os.listdir("/proc/self/fd")),
        "command": open("/proc/self/cmdline").read().rstrip("\\0"), "words": sys.orig_argv[1:], "file": __file__,
    }
    print(json.dumps(facts))
    print("said aside", file=sys.stderr)
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(FACTS)
    return file


def run(script: Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(script), "a word", "--option"]
    return subprocess.run(command, input="a line", capture_output=True, text=True, check=False, timeout=60, **options)


@pytest.mark.usefixtures("unmeasured")
def test_a_program_finds_in_a_warm_interpreter_what_it_finds_in_a_new_one(script: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    options = {
        "cwd": tmp_path / "inner",
        "env": os.environ | {"TMPDIR": str(tmp_path), "OF_MY_OWN": "yes"},
        "start_new_session": True,
    }
    warm = run(script, **options)
    with cold():
        new = run(script, **options)
    facts, of_a_new_one = json.loads(warm.stdout), json.loads(new.stdout)
    assert facts["parent"] == os.getpid()
    assert len(facts.pop("handles")) == len(of_a_new_one.pop("handles")) + SPARES[SCRIPT]
    assert facts == of_a_new_one
    assert (warm.returncode, warm.stderr) == (new.returncode, new.stderr) == (7, "said aside\n")


def test_what_killed_processes_have_left_of_their_measurements_is_removed(tmp_path: Path) -> None:
    whole = coverage.CoverageData(str(tmp_path / ".coverage.whole"))
    whole.add_lines({"a.py": [1, 2, 3]})
    whole.write()
    whole.close(force=True)
    content = (tmp_path / ".coverage.whole").read_bytes()
    for name, left in (("empty", b""), ("cut", content[:100]), ("zeros", bytes(len(content))), ("cut-journal", b"x")):
        (tmp_path / f".coverage.{name}").write_bytes(left)
    drop_damaged_measurements(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".coverage.whole"]


def test_it_is_warm(script: Path) -> None:
    script.write_text("import sys\nprint('torch' in sys.modules)\n")
    assert run(script).stdout == "True\n"
    with cold():
        assert run(script).stdout == "False\n"
    assert run(script, env=os.environ | {"PYTHONHASHSEED": "3"}).stdout == "False\n"


def test_a_signal_ends_it_alone(script: Path) -> None:
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        command = [sys.executable, str(script)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()  # what was started in a thread does not end with it
    (process,) = started
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "here\n"
    assert str(script) in command_line(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert await_condition("the next one", lambda: run(script.with_name("none.py")).returncode) == 1
