"""A coordinator's process as a child of this one."""

import contextlib
import json
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.core.networks import Network
from quorate.core.processes import StoppedProcesses, describe_departure
from quorate.engines.interpreters import FRESH, Interpreters
from quorate.storage.run_folder import RunFolder

GLANCE = 0.1
"""Seconds between two looks at whether one that does not listen yet is stopped."""


class CoordinatorChildProcess:
    """It ends with whoever has started it, whose end of the pipe closes. Fulfils `CoordinatorChild`."""

    def __init__(self, appointment: Mapping[str, Any], network: Network, interpreters: Interpreters = FRESH) -> None:
        self._log_file = RunFolder(Path(appointment["run"])).logs / "coordinator.log"
        placed = {**appointment, "host": network.address, "network": network.namespace}
        with self._log_file.open("ab") as file:
            self._process = interpreters.start(
                "quorate.coordinator", [], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file.fileno()
            )
        self.pid = self._process.pid
        self._stopped = StoppedProcesses(appointment["failure_timeout"])
        self._why_killed = ""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which `await_answer` tells
            self._process.stdin.write(json.dumps(placed).encode() + b"\n")
            self._process.stdin.flush()

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        assert self._process.stdout is not None
        over = None if limit is None else time.monotonic() + limit
        while not select.select([self._process.stdout], [], [], GLANCE if limit is None else min(GLANCE, limit))[0]:
            now = time.monotonic()
            for seconds in self._stopped.look(now, [self.pid]).values():
                self._why_killed = f", which had been stopped (SIGSTOP) for {seconds:.1f} s,"
                self.kill()
            if over is not None and now >= over:
                return {}
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise JobError(f"{self.departure} before it listened; its log is {self._log_file}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failure("RequestError", answer["error"], exit_code=answer["exit_code"]).error()
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def departure(self) -> str:
        return f"the coordinator (pid {self.pid}){self._why_killed} {describe_departure(self._process.wait())}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def await_end(self) -> None:
        self._process.wait()

    def let_go(self, patience: float) -> None:
        """Have it end, by itself for so many seconds; what it has said can still be read."""
        assert self._process.stdin is not None
        if patience <= 0:
            # Before it sees its standard input end: it would write down that the job is over.
            self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()

    def close(self, patience: float) -> None:
        assert self._process.stdout is not None
        self.let_go(patience)
        self._process.stdout.close()
