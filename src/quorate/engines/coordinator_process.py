"""The coordinator's process, as its launcher holds it."""

import contextlib
import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.core.processes import describe_departure


class CoordinatorProcess:
    """Starts at once, beside everything else; ends with the launcher, whose end of the pipe closes."""

    def __init__(self, log_file: Path, appointment: dict[str, Any]) -> None:
        self._log_file = log_file
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "quorate.coordinator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher alone, which stops the job in order
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which `address` tells
            self._process.stdin.write(json.dumps(appointment).encode() + b"\n")
            self._process.stdin.flush()

    def address(self, limit: float | None = None) -> str:
        """Where it listens; waits until it does, for so many seconds at most."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            self.kill()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise JobError(f"{self.departure} before it listened; its log is {self._log_file}.")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure("RequestError", answer["error"], exit_code=answer["exit_code"]).error()
        return str(answer["address"])

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def departure(self) -> str:
        """How it has ended, once it has."""
        return f"the coordinator (pid {self._process.pid}) {describe_departure(self._process.returncode)}"

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def close(self, patience: float) -> None:
        """Let it go: it ends by itself when its standard input does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
