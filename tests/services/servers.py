"""Real services for tests: each on a free port of loopback, in a folder of its own, and ended with all its children."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

STARTS_WITHIN = 90.0
"""Seconds that a service may take to answer, on a machine that is busy with others."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def answers(url: str) -> bool:
    """Whether there is somebody who says that all is well."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; `what` names it where it does not come to hold."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} did not hold within {seconds} s"
        time.sleep(0.1)


class Service:
    """A program that answers at an address, and can be killed and started again there.

    It has a session of its own, so that what it has started itself is ended with it.
    """

    def __init__(self, command: Sequence[str], health: str, log: Path, environment: Mapping[str, str] = {}) -> None:
        self._command = list(command)
        self._health = health
        self._log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._log.parent,
                start_new_session=True,
            )
        self._process = process
        end = time.monotonic() + STARTS_WITHIN
        while not answers(self._health):
            if process.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"{self._command[0]} does not answer at {self._health}:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it and all that it has started, as a cut of power would."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class MlflowServer(Service):
    """A real MLflow server on SQLite; what it keeps is below `folder`, and survives it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.folder = folder
        self.uri = f"http://127.0.0.1:{port}"
        self.artifacts = folder / "artifacts"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.artifacts)]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        super().__init__(command, f"{self.uri}/health", folder / "server.log", quiet)
