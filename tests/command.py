"""The real `quorate` command in a folder of its own: its files, its processes, and what it leaves behind."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pytest

from warm import cold

Found = TypeVar("Found")

TASK_SOURCE = (Path(__file__).parent / "command_task.py").read_text()
PATIENCE = 200.0  # of machines that are busy with something else
AFTER_MESSAGE = re.compile(r"\n\n|\nnext: |\nusage: ")
JOB: dict[str, Any] = {
    "name": "tiny",
    "task": "task.py:Tiny",
    "lanes": 4,
    "batch_size": 8,
    "steps": 8,
    "failure_timeout": 6.0,
    "checkpoint": {"every": 2, "keep": 3},
    "audit": {"every": 0},  # tests count how often loss() is called, and which checkpoints are kept
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        fields: dict[str, Any] = json.loads(self.stdout, parse_constant=_refuse_constant)
        return fields

    @property
    def error(self) -> str:
        """The one message that standard error ends with, without traceback and advice."""
        before, found, rest = self.stderr.partition("error: ")
        assert found, f"no error was told: {self.stderr!r}"
        assert "error: " not in before
        return AFTER_MESSAGE.split(rest)[0].strip()

    @property
    def traceback(self) -> str:
        """The one traceback of the user's, if there is one: it stands between the message and the advice."""
        assert self.stderr.count("Traceback") <= 1
        _, found, rest = self.stderr.partition("error: ")[2].partition("\n\n")
        return rest.partition("\n\nnext: ")[0] if found else ""

    @property
    def advice(self) -> str:
        """What to do next."""
        (advice,) = re.findall(r"^next: (.*)$", self.stderr, re.MULTILINE)
        return str(advice)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def await_condition(what: str, condition: Callable[[], Found | None], seconds: float = PATIENCE) -> Found:
    """Wait until a condition gives something that is true."""
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        found = condition()
        if found:
            return found
        time.sleep(0.01)  # between two looks
    raise AssertionError(f"waited {seconds} s in vain for {what}")


class Running:
    """A command that is under way."""

    def __init__(self, process: subprocess.Popen[str], workplace: "Workplace") -> None:
        self.process = process
        self.workplace = workplace
        self._told_before = {str(run): len(workplace.events(run)) for run in workplace.runs()}

    def await_event(self, kind: str, at_least: int = 0) -> dict[str, Any]:
        """Wait until the newest run tells an event of this kind, at this step or later."""
        return await_condition(f"a {kind} event", lambda: self._event(kind, at_least))

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def done(self, within: float = PATIENCE) -> Done:
        """Wait for its end."""
        stdout, stderr = self.process.communicate(timeout=within)
        return Done(self.process.returncode, stdout, stderr)

    def await_asked(self, what: str) -> None:
        """Wait until a worker of the newest run has heard that it is to stop, or to save: the coordinator tells of a
        stop before that."""
        words = f"asked to {what} at the next step boundary"
        logs = self.workplace.last / "logs"
        await_condition(
            f"a worker {words}",
            lambda: any(words in self.workplace.log(file.stem) for file in logs.glob("worker-*.jsonl")),
        )

    def _event(self, kind: str, at_least: int) -> dict[str, Any] | None:
        has_ended = self.process.poll() is not None  # before the look: it may end with what is waited for
        for run in self.workplace.runs()[-1:]:
            for event in self.workplace.events(run)[self._told_before.get(str(run), 0) :]:
                if event["kind"] == kind and event.get("step", 0) >= at_least:
                    return event
        assert not has_ended, f"the command has ended: {self.process.communicate()}"
        return None


TITLES = {
    "quorate.coordinator": "quorate: coordinator",
    "quorate.engines.fork_server": "quorate: fork server",
    "quorate.tune.local_search": "quorate: trials",
}


class Workplace:
    """A folder with a task and a job file, in which commands are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = folder / "task.py"
        self.task.write_text(TASK_SOURCE)
        self.job = folder / "job.yaml"
        self.write_job()
        # Beside the folder: what stands in it is looked at by tests, and the path of a socket may not be long.
        self.temporary = folder.parent / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self._running: list[Running] = []

    def write_job(self, **keys: Any) -> None:
        """Write the job file: the usual keys with these over them; None leaves one out."""
        fields = {key: value for key, value in {**JOB, **keys}.items() if value is not None}
        self.job.write_text(json.dumps(fields, indent=1))  # JSON is YAML too

    def start(self, *arguments: str, **environment: str) -> Running:
        """Give a command, as a terminal does: in a process group of its own."""
        return self.start_module("quorate", *arguments, **environment)

    def start_module(self, module: str, *arguments: str, **environment: str) -> Running:
        """Start any module as a program, like a command."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running = Running(process, self)
        self._running.append(running)
        return running

    def run(self, *arguments: str, **environment: str) -> Done:
        """Give a command and wait for its end, after which none of its processes may be left."""
        done = self.start(*arguments, **environment).done()
        self.assert_nobody_left()
        return done

    def run_into(self, stdout: TextIO | None, *arguments: str) -> Done:
        """Give a command whose standard output is this file, or is closed."""
        command = [sys.executable, "-m", "quorate", *arguments]
        if stdout is None:
            command = ["sh", "-c", f"exec {shlex.join(command)} >&-"]
        done = subprocess.run(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        self.assert_nobody_left()
        return Done(done.returncode, "", done.stderr)

    def train(self, *arguments: str, **environment: str) -> Done:
        """Train the job file."""
        return self.run("train", "job.yaml", *arguments, **environment)

    def runs(self) -> list[Path]:
        """All run folders, oldest first."""
        return sorted((self.folder / "runs").glob("*-[0-9]*"))

    @property
    def last(self) -> Path:
        """The newest run folder."""
        return self.runs()[-1]

    def events(self, run: Path | None = None) -> list[dict[str, Any]]:
        """What a run, the newest by default, has told so far; whole lines only."""
        file = (run or self.last) / "events.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def failures(self) -> list[dict[str, Any]]:
        """The failures among them."""
        return [event for event in self.events() if event["kind"] == "failure"]

    def result(self) -> dict[str, Any]:
        """How the newest run has ended."""
        fields: dict[str, Any] = json.loads((self.last / "result.json").read_text())
        return fields

    def checkpoints(self) -> list[str]:
        """Names of the newest run's checkpoints, oldest first."""
        return sorted(path.name for path in (self.last / "checkpoints").glob("step-*"))

    def log(self, name: str) -> str:
        """The messages of a log of the newest run, a line each."""
        return "".join(f"{record['message']}\n" for record in self.log_records(name))

    def log_records(self, name: str) -> list[dict[str, Any]]:
        """A log of the newest run; whole lines only."""
        file = self.last / "logs" / f"{name}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def pids(self, word: str = "") -> list[int]:
        """Processes that stand in this folder, as every process of a job does, with a word in their command line, or of
        a module that shows itself by a title."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = command_line(int(entry.name))
                if entry.joinpath("cwd").readlink() == self.folder and (word in line or TITLES.get(word, word) in line):
                    found.append(int(entry.name))
            except OSError:
                continue  # gone meanwhile, or a zombie
        return sorted(found)

    def go(self) -> None:
        """Let go of every loss that HOLD holds."""
        (self.folder / "go").touch()

    def workers(self) -> list[int]:
        """The pids of the workers, and of their loaders: what the fork server has forked."""
        servers = self.pids("quorate.engines.fork_server")
        # Not by their numbers: these begin anew when all have been given.
        forked = [pid for pid in self.pids() if parent_of(pid) in servers]
        return forked + [pid for pid in self.pids() if parent_of(pid) in forked]

    def assert_nobody_left(self, within: float = 60.0) -> None:
        """Wait until no process of any command given here is left."""
        await_condition("the end of all processes", lambda: not self.pids(), within)

    def clean_up(self) -> None:
        """End what a failed test has left running."""
        for running in self._running:
            if running.process.poll() is None:
                running.process.kill()
                running.process.communicate()
        for pid in self.pids():  # one that a test has stopped does not end with its parent
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_step(step: int, workers: int) -> str:
    """The call of the loss, of a worker, with which this step of the usual job begins."""
    return str((step - 1) * JOB["lanes"] // workers + 1)


def command_line(pid: int) -> str:
    """A process's arguments."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def parent_of(pid: int) -> int | None:
    """A process's parent, if it is there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    """A folder of the test's own, in which nothing runs any more when the test is over."""
    place = Workplace(tmp_path)
    yield place
    place.clean_up()
    place.assert_nobody_left()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the usual job was trained undisturbed, once for all processes of the test run: to be read."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "finished"
    with (shared / "finished-lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            with cold():
                done = Workplace(folder).train("--workers", "2", "--json")
            assert done.code == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def undisturbed(finished: Path) -> str:
    """The digest of the usual job when nothing happens to it."""
    digest: str = json.loads((finished / "runs" / "tiny-0001" / "result.json").read_text())["weights_digest"]
    return digest


@pytest.fixture
def used_workplace(workplace: Workplace, finished: Path) -> Workplace:
    """A folder of the test's own in which the usual job has been trained already."""
    shutil.copytree(finished / "runs", workplace.folder / "runs")
    job = workplace.last / "job.yaml"
    job.write_text(job.read_text().replace(str(finished), str(workplace.folder)))
    return workplace
