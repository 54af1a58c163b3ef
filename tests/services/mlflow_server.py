"""A real MLflow server that can be killed and started again; and what is in its database."""

import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from command import await_condition


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class MlflowServer:
    """`mlflow server` on a database and a folder of its own, on a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.database = folder / "server.db"
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--backend-store-uri", f"sqlite:///{self.database}", "--workers", "1"),
                    *("--artifacts-destination", str(self.folder / "artifacts")),
                ],
                cwd=self.folder,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        await_condition("an MLflow server", self._is_healthy)

    def kill(self) -> None:
        """It and what it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_healthy(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Database:
    """What MLflow has kept in a file of SQLite, read without MLflow."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def ask(self, query: str, *values: Any) -> list[Any]:
        if not self._file.exists():
            return []
        with closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'metrics'").fetchall():
                return []  # it is still being made
            return connection.execute(query, values).fetchall()

    def runs(self) -> dict[str, str]:
        """The status of each run by its name; no name comes twice."""
        rows = self.ask("SELECT name, status FROM runs")
        assert len(dict(rows)) == len(rows), f"more than one run for a run: {rows}"
        return dict(rows)

    def curves(self, run: str) -> dict[str, list[tuple[int, float]]]:
        """The points of each metric, by step; NaN as such."""
        curves: dict[str, list[tuple[int, float]]] = {}
        rows = self.ask(
            "SELECT key, step, value, is_nan FROM metrics JOIN runs USING (run_uuid) WHERE name = ? ORDER BY key, step",
            run,
        )
        for key, step, value, is_nan in rows:
            curves.setdefault(key, []).append((step, math.nan if is_nan else value))
        return curves

    def pairs(self, table: str, run: str) -> dict[str, str]:
        """Its parameters (`params`) or tags (`tags`)."""
        return dict(self.ask(f"SELECT key, value FROM {table} JOIN runs USING (run_uuid) WHERE name = ?", run))
