"""Running one script to its end: its one line of JSON, or why there is none."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quorate
from quorate.core.processes import die_with_parent
from quorate.engines.local import ENVIRONMENT
from quorate.spec.keys import PREFIX

GLANCE = 0.1
"""Seconds between two looks at whether the benchmark is to end."""

PATIENCE = 5.0
"""Seconds that a script has to end by itself when it is asked to."""

LIMIT = 900.0
"""Seconds that one script may take."""

INTERRUPTED = "interrupted"

_ROOT = Path(__file__).parent.parent

# The path is appended: it must not hide what the peers' interpreter has itself.
_START = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Trouble:
    """Why a script has no answer."""

    reason: str


@dataclass(frozen=True)
class Scripts:
    """Runs scripts in a folder that holds all they write, until `stop` says that the benchmark is to end."""

    folder: Path
    stop: Callable[[], bool]
    limit: float = LIMIT
    environment: dict[str, str] = field(default_factory=lambda: environment_of_scripts(os.environ))

    def run(self, command: Sequence[str]) -> dict[str, Any] | Trouble:
        """The answer of one script. When this returns, none of its processes is left."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            # What a program leaves when it is killed goes with the folder.
            env=self.environment | {"TMPDIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            return self._await(process)
        finally:
            _end(process)

    def _await(self, process: subprocess.Popen[str]) -> dict[str, Any] | Trouble:
        over = time.monotonic() + self.limit
        while True:
            if self.stop():
                return Trouble(INTERRUPTED)
            if time.monotonic() > over:
                return Trouble(f"it took longer than {self.limit:g} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                stdout, stderr = process.communicate(timeout=GLANCE)
                return answer_of(process.returncode, stdout, stderr)


def script_command(python: str, module: str, order: dict[str, Any], prefix: Sequence[str] = ()) -> list[str]:
    """How a module of this package, which the environment's path leads to, is started with any interpreter."""
    return [*prefix, python, "-c", _START, str(Path(quorate.__file__).parent.parent), module, json.dumps(order)]


def environment_of_scripts(environment: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """One thread for everybody, and no variable that would change a job of the benchmark."""
    kept = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    kept.pop("OMP_THREAD_LIMIT", None)
    path = [str(_ROOT), kept.get("PYTHONPATH", "")]
    return kept | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def answer_of(code: int, stdout: str, stderr: str) -> dict[str, Any] | Trouble:
    """What a script that has ended says."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    words = [line.strip() for line in stderr.splitlines() if line.strip()]
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return Trouble(f"its script {ending}: {words[-1] if words else 'it said nothing'}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the script and everything in its group to end, then make them; it returns when they have ended."""
    with process:  # closes its pipes, which a process that it has left behind might hold open
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
        if not _has_ended(process, PATIENCE):
            _signal(process, signal.SIGKILL)
            _has_ended(process, PATIENCE)


def _has_ended(process: subprocess.Popen[str], patience: float) -> bool:
    """Whether the script and its group have ended, for which it waits so many seconds."""
    over = time.monotonic() + patience
    while process.poll() is None or _signal(process, 0):
        if time.monotonic() > over:
            return False
        time.sleep(GLANCE / 10)
    return True


def _signal(process: subprocess.Popen[str], number: int) -> bool:
    """Whether there was anybody to hear it."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
