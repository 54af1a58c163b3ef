"""A coordinator's process as a child of this one."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.core.addresses import Network
from quorate.core.errors import JobError
from quorate.core.failure import Failure
from quorate.core.processes import StoppedProcesses, describe_departure
from quorate.engines.warm import Program
from quorate.storage.run_folder import RunFolder

GLANCE = 0.1
"""Seconds between two looks at whether one that does not listen yet is stopped."""


def _start(stdin: int, stdout: int, stderr: int) -> Program:
    """In a session of its own: Ctrl-C is for the launcher alone."""
    program = [sys.executable, "-P", "-m", "quorate.coordinator"]
    return subprocess.Popen(program, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


class CoordinatorChildProcess:
    """It ends with whoever has started it, whose end of the pipe closes. Fulfils `CoordinatorChild`."""

    def __init__(
        self,
        appointment: Mapping[str, Any],
        network: Network,
        fork: Callable[[Sequence[int]], Program | None] = lambda _streams: None,
    ) -> None:
        """`fork` starts one with these streams in less time than an interpreter takes, if it can."""
        self._log_file = RunFolder(Path(appointment["run"])).logs / "coordinator.log"
        placed = {**appointment, "host": network.address, "network": network.namespace}
        with self._log_file.open("ab") as file:
            (stdin, told), (said, stdout) = os.pipe(), os.pipe()
            self._stdin, self._stdout = os.fdopen(told, "wb"), os.fdopen(said, "rb")
            streams = stdin, stdout, file.fileno()
            try:
                self._process = fork(streams) or _start(*streams)
            finally:
                os.close(stdin)
                os.close(stdout)
        self.pid = self._process.pid
        self._stopped = StoppedProcesses(appointment["failure_timeout"])
        self._why_killed = ""
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which `await_answer` tells
            self._stdin.write(json.dumps(placed).encode() + b"\n")
            self._stdin.flush()

    def await_answer(self, limit: float | None = None) -> dict[str, Any]:
        over = None if limit is None else time.monotonic() + limit
        while not select.select([self._stdout], [], [], GLANCE if limit is None else min(GLANCE, limit))[0]:
            now = time.monotonic()
            for seconds in self._stopped.look(now, [self.pid]).values():
                self._why_killed = f", which had been stopped (SIGSTOP) for {seconds:.1f} s,"
                self.kill()
            if over is not None and now >= over:
                return {}
        line = self._stdout.readline()
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

    def close(self, patience: float) -> None:
        if patience <= 0:
            # Before it sees its standard input end: it would write down that the job is over.
            self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stdout.close()
