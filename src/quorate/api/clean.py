"""Which old runs, or checkpoints of them, may be removed, how much space that frees, and removing them."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.retention import Retention, surplus
from quorate.checkpoint.store import CheckpointFolder
from quorate.core.errors import QuorateError, RequestError
from quorate.core.runs_folder import is_search
from quorate.history.run_record import RunQuery, RunRecord, Status, chosen, read_runs
from quorate.observe.quantities import measure
from quorate.spec.resolved import glance_at_recorded
from quorate.spec.tracking import TrackSpec
from quorate.storage.atomic import discard, explaining
from quorate.storage.run_folder import RunFolder
from quorate.storage.run_notes import kept_ids, tracking_uri

REMOVING = ".removing-"
Asked = dict[str, dict[str, list[str]] | str]
"""By the address of a registry: its versions by MLflow run, or why it cannot be asked."""


@dataclass(frozen=True)
class Surplus:
    """A run that may go as a whole with its copies in the MLflow file beside it; or some of its checkpoints."""

    record: RunRecord
    checkpoints: tuple[CheckpointInfo, ...] | None
    copies: tuple[Path, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What may go, and what is old enough and stays, with the reason."""

    found: tuple[Surplus, ...]
    kept: tuple[tuple[str, str], ...]


def plan(
    runs: Path, query: RunQuery, now: datetime, older_than: float | None, keep: int | None, *, only_checkpoints: bool
) -> Plan:
    """Look for runs that ended more than `older_than` seconds ago and are not among the newest `keep`."""
    if is_search(runs.parent):
        raise RequestError(f"the runs in {runs} are trials of the search {runs.parent.name}, which names them.")
    records = read_runs(runs)
    bests = best_by_name(records)
    asked: Asked = {}
    found, kept = [], []
    for record in chosen(records, query)[keep or 0 :]:
        if older_than is not None and age_of(record, now) <= older_than:
            continue
        run = RunFolder(record.path)
        why = _why_busy(record, run)
        if not why and not only_checkpoints and record in bests and record.best is not None:
            best = f"{record.best.watched.metric} {measure(record.best.value)}"
            why = f"it is the best of {_job(record)} ({best})"
        if why := why or why_registered(run, asked):
            kept.append((record.name, why))
        elif not only_checkpoints:
            copies = tuple(copy for run_id in _ids_beside(run) for copy in _registry(_beside(run)).folders(run_id))
            found.append(Surplus(record, None, copies, sum(map(_bytes_in, (run.path.resolve(), *copies)))))
        elif extra := _extra_checkpoints(run, record):
            found.append(Surplus(record, extra, (), sum(_bytes_in(each.path) for each in extra)))
    return Plan(tuple(found), tuple(kept))


def age_of(record: RunRecord, now: datetime) -> float:
    """Seconds since a run ended, or since it was created where that is not known."""
    return max(0.0, (now - (record.ended or record.created)).total_seconds())


def best_by_name(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Of each job's runs the one with the best evaluation, by each metric that they are compared by."""
    bests: dict[object, RunRecord] = {}
    for record in records:
        if record.best is not None:
            key = _job(record), record.best.watched
            known = bests.get(key)
            if known is None or known.best is None or record.best.rank < known.best.rank:
                bests[key] = record
    return list(bests.values())


def why_registered(run: RunFolder, asked: Asked) -> str:
    """Why a run stays for the sake of the registry of models; nothing where no version comes from it."""
    ids = kept_ids(run)
    if not ids:  # whoever registers a run tracks it, too
        return ""
    from quorate.tracking.mlflow_client import database_of

    for uri in sorted({*ids, _beside(run)}):
        if (database := database_of(uri)) is not None and not database.exists():
            continue
        if uri not in asked:
            try:
                asked[uri] = _registry(uri).named()
            except QuorateError as error:
                asked[uri] = f"whether its model is registered cannot be asked: {error.message}"
        told = asked[uri]
        if isinstance(told, str):
            return told
        if versions := [version for run_id in ids.values() for version in told.get(run_id, ())]:
            return f"its model is registered as {', '.join(sorted(set(versions)))}"
    return ""


def remove(found: Surplus) -> None:
    """Remove it, unless somebody has taken up the run meanwhile: an error."""
    run = RunFolder(found.record.path)
    with run.lock():
        if found.checkpoints is not None:
            for info in found.checkpoints:
                CheckpointFolder.at(run.checkpoints).remove(info.path)
            return
        for run_id in _ids_beside(run):
            _registry(_beside(run)).delete_run(run_id)
        real = run.path.resolve()
        # Two levels, so that nobody takes half a run for a run; a run that is linked to lies elsewhere.
        aside = real.parent / f"{REMOVING}{secrets.token_hex(4)}"
        with explaining(f"cannot remove run {run.name}"):
            aside.mkdir(0o700)
            real.rename(aside / run.name)
            if run.path.is_symlink():
                run.path.unlink()
        for folder in (aside, *found.copies):
            discard(folder)


def _why_busy(record: RunRecord, run: RunFolder) -> str:
    if record.status in (Status.RUNNING, Status.SUBMITTED):
        return f"it is {record.status}"
    if run.stored is not None or run.checkpoints.is_symlink():
        there = run.stored or run.checkpoints.resolve().parent
        return f"a part of it is in its engine.storage, {there}"
    return ""


def _job(record: RunRecord) -> str:
    return str(glance_at_recorded(RunFolder(record.path).job_file).get("name") or record.name)


def _extra_checkpoints(run: RunFolder, record: RunRecord) -> tuple[CheckpointInfo, ...]:
    """All but the best, the newest that is whole, and what the job keeps for ever."""
    folder = CheckpointFolder.at(run.checkpoints)
    infos, newest = {info.cursor: info for info in folder.list()}, folder.search().newest
    rules = glance_at_recorded(run.job_file).get("checkpoint")
    every = rules.get("keep_every") if isinstance(rules, dict) else None
    best = record.best.step if record.best else None
    bests = {cursor: info.best for cursor, info in infos.items()}
    extra = surplus(list(infos), Retention(1, every), best, newest.cursor if newest else None, bests)
    return tuple(infos[cursor] for cursor in extra)


def _beside(run: RunFolder) -> str:
    """The MLflow file in the folder of runs: what it has of a run goes with the run, what a server has does not."""
    return tracking_uri(TrackSpec(mlflow=True), run.path.parent)


def _registry(uri: str) -> Any:
    """The registry of models there, which is imported for tracked runs alone."""
    return resolve_name("quorate.api.models:ModelRegistry")(uri)


def _ids_beside(run: RunFolder) -> list[str]:
    ids = [run_id for uri, run_id in kept_ids(run).items() if uri == _beside(run)]
    if not ids:
        return ids
    from quorate.tracking.mlflow_client import database_of

    database = database_of(_beside(run))
    return ids if database is not None and database.exists() else []


def _bytes_in(folder: Path) -> int:
    inner = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)  # noqa: PTH118
    return sum(os.lstat(file).st_size for file in inner)
