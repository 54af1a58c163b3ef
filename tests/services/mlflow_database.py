"""What MLflow has kept in a file of SQLite, read without MLflow."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


class Database:
    """Of a server, or in the folder of runs."""

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
