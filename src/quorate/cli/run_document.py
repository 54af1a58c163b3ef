"""Runs of a list as a document for programs."""

from datetime import datetime
from typing import Any

from quorate.core.finite import finite
from quorate.history.run_list import Listing
from quorate.history.run_record import RunRecord


def runs_document(listing: Listing, now: datetime) -> dict[str, Any]:
    """A list of runs: those shown, how many fit the query, and how many there are."""
    document: dict[str, Any] = finite(
        {
            "folder": str(listing.folder.absolute()),
            "total": len(listing.records),
            "fitting": len(listing.fitting),
            "runs": [record_document(record, now) for record in listing.shown],
        }
    )
    return document


def record_document(record: RunRecord, now: datetime) -> dict[str, Any]:
    """One run of a list."""
    best = record.best
    return {
        "run": record.name,
        "folder": str(record.path.absolute()),
        "status": record.status.value,
        "reason": record.reason or None,
        "steps": record.steps,
        "total_steps": record.total_steps,
        "ending": record.ending or None,
        "best": None if best is None else {"metric": best.watched.metric, "value": best.value, "step": best.step},
        "final_metrics": record.metrics,
        "weights_digest": record.weights_digest or None,
        "samples_per_second": record.samples_per_second,
        "wall_seconds": record.wall_seconds,
        "created": written(record.created),
        "ended": written(record.ended),
        "age_seconds": round(record.age(now), 3),
        "task": record.task or None,
        "lanes": record.lanes,
        "workers": record.workers,
        "failure": None if record.failure is None else record.failure.to_dict(),
    }


def written(time: datetime | None) -> str | None:
    """A time as JSON holds it, in ISO 8601."""
    return None if time is None else time.isoformat(timespec="milliseconds")
