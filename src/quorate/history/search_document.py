"""A search as a JSON document, by docs/json/search.schema.json: what `quorate show SEARCH` and `quorate tune` print."""

from dataclasses import asdict
from typing import Any

from quorate.history.importance import Importance
from quorate.history.run_detail import Advice
from quorate.history.search_log import TrialStatus
from quorate.history.search_record import SearchRecord, TrialRecord


def search_document(record: SearchRecord, importance: Importance, advice: Advice | None) -> dict[str, Any]:
    """Everything about a search, with all its trials in the order of their numbers."""
    job, spec = record.folder.best_job_file, record.spec
    return search_summary(record) | {
        "best_job": str(job.absolute()) if job.is_file() else None,
        "report": str(page.absolute()) if (page := record.folder.report_page).is_file() else None,
        "algorithm": None if spec is None else spec.algorithm.model_dump(),
        "scheduler": None if spec is None else spec.scheduler.model_dump(),
        "space": {key: each.model_dump(exclude_none=True) for key, each in record.space.items()},
        "resumed": record.resumed,
        "front": [trial.number for trial in record.front] if len(record.objectives) > 1 else None,
        "importance": {
            "shares": dict(importance.shares),
            "method": importance.method or None,
            "trials": importance.trials,
            "missing": importance.missing or None,
        },
        "trials": [_trial(record, trial) for trial in record.trials],
        "problems": list(record.problems),
        "next": None if advice is None else asdict(advice),
    }


def search_summary(record: SearchRecord) -> dict[str, Any]:
    """A search as a list of them has it."""
    best = record.best
    return {
        "search": record.name,
        "folder": str(record.folder.path.absolute()),
        "status": record.status.value,
        "reason": record.reason or None,
        "created": record.created.isoformat(timespec="milliseconds"),
        "objectives": [{"metric": each.metric, "mode": each.mode} for each in record.objectives],
        "best": None if best is None else _trial(record, best),
        "planned_trials": record.planned,
        "counts": {status.value: record.counts[status] for status in TrialStatus},
        "steps": record.steps,
        "saved_steps": record.saved_steps,
        "training_seconds": round(record.training_seconds, 3),
        "active_seconds": round(record.active_seconds, 3),
    }


def _trial(record: SearchRecord, trial: TrialRecord) -> dict[str, Any]:
    metrics = [watched.metric for watched in record.objectives]
    return {
        "trial": trial.number,
        "params": trial.params,
        "status": trial.status.value,
        "why": trial.why or None,
        "run": trial.run or None,
        "folder": str(record.folder.run(trial.run).path.absolute()) if trial.has_run else None,
        "node": trial.node or None,
        "values": dict(zip(metrics, trial.values, strict=True)) if trial.values else None,
        "best_step": None if trial.best is None else trial.best.step,
        "metrics": trial.metrics,
        "curve": [list(point) for point in trial.curve],
        "steps": trial.steps,
        "total_steps": trial.total_steps,
        "seconds": None if trial.seconds is None else round(trial.seconds, 3),
        "weights_digest": trial.digest or None,
        "lineage": [asdict(each) for each in trial.lineage],
    }
