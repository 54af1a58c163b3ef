"""A list of runs: all in a folder, those that a person asks for, in the order that a person asks for."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.history.run_record import RunRecord, Status
from quorate.storage.run_folder import RunFolder


class Order(StrEnum):
    """What a list of runs is sorted by."""

    AGE = "age"  # the newest first
    NAME = "name"
    STATUS = "status"  # the most pressing first
    STEPS = "steps"  # the longest first
    METRIC = "metric"  # the best first


@dataclass(frozen=True)
class RunQuery:
    """Which runs, in which order, and how many of them at most; by default all, the newest first."""

    statuses: tuple[Status, ...] = ()
    task: str = ""
    name: str = ""
    order: Order = Order.AGE
    reverse: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Listing:
    """The runs in a folder, and those of them that fit a query, in its order."""

    folder: Path
    query: RunQuery
    records: tuple[RunRecord, ...]
    fitting: tuple[RunRecord, ...]

    @classmethod
    def read(cls, folder: Path, query: RunQuery) -> "Listing":
        """From a folder of run folders; one that is not there has no runs."""
        records = read_runs(folder)
        return cls(folder, query, records, chosen(records, query))

    @property
    def shown(self) -> tuple[RunRecord, ...]:
        """Those that fit, as many as were asked for."""
        return self.fitting[: self.query.limit]


def read_runs(folder: Path) -> tuple[RunRecord, ...]:
    """All runs in a folder, oldest first. One that is removed meanwhile is left out, one that is broken is not."""
    records = []
    for run in RunFolder.all_in(folder):
        with contextlib.suppress(RunError):
            record = RunRecord.read(run)
            if run.path.is_dir():
                records.append(record)
    return tuple(records)


def chosen(records: Sequence[RunRecord], query: RunQuery) -> tuple[RunRecord, ...]:
    """Those that fit a query, in its order, without its limit."""
    fitting = sorted((record for record in records if _fits(record, query)), key=_newest_first)
    # What has no metric stands last in either direction: it is neither good nor bad.
    last = [each for each in fitting if query.order is Order.METRIC and each.best is None]
    placed = [each for each in fitting if query.order is not Order.METRIC or each.best is not None]
    return (*sorted(placed, key=_KEYS[query.order], reverse=query.reverse), *last)


def has_task(reference: str, wanted: str) -> bool:
    """Whether a task is meant by its class, its file or module, both, or the end of a path to it."""
    place, _, class_name = reference.rpartition(":")
    names = (reference, place, class_name, place.removesuffix(".py"))
    return any(name == wanted or name.endswith((f"/{wanted}", f".{wanted}")) for name in names)


def _fits(record: RunRecord, query: RunQuery) -> bool:
    return (
        (not query.statuses or record.status in query.statuses)
        and (not query.task or has_task(record.task, query.task))
        and record.name.startswith(query.name)
    )


def _newest_first(record: RunRecord) -> tuple[float, str]:
    return -record.created.timestamp(), record.name


_KEYS: dict[Order, Callable[[RunRecord], Any]] = {
    Order.AGE: _newest_first,
    Order.NAME: lambda record: record.name,
    Order.STATUS: lambda record: list(Status).index(record.status),
    Order.STEPS: lambda record: -record.steps,
    Order.METRIC: lambda record: (record.best.watched.metric, record.best.rank) if record.best else (),
}
