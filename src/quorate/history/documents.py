"""What is known of runs as JSON documents, for whoever shows them: the command line's `--json`, or a web page.

Each is described by a schema in docs/json.
"""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from quorate.history.checkpoint_list import CheckpointList, CheckpointRecord, Kept, nearest_saved
from quorate.history.difference import Pair, Parting, RunPair
from quorate.history.run_detail import Advice, JobValue, RunDetail, job_values
from quorate.history.run_list import Listing
from quorate.history.run_record import RunRecord, moment
from quorate.history.timeline import Curve, RunPace, Timeline, loss_curves, metric_curves
from quorate.observe.event import plain
from quorate.observe.events import GenerationFormed, RunFailed, RunStopped, WorkerLost
from quorate.spec.override import Absent
from quorate.storage.run_folder import finite


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


def detail_document(detail: RunDetail, advice: Advice | None, now: datetime) -> dict[str, Any]:
    """Everything about one run."""
    record, timeline, timing = detail.record, detail.timeline, detail.timing
    launcher = record.launcher
    document = record_document(record, now)
    if record.best is not None:
        document["best"] |= {"nearest_saved": nearest_saved(record.best.step, detail.checkpoints)}
    document |= {
        "next": None if advice is None else asdict(advice),
        "problems": list(detail.problems),
        "launcher_pid": None if launcher is None else launcher.pid,
        "coordinator": None if launcher is None else detail.address,
        "active_seconds": round(timeline.active_seconds, 3),
        "pace": _pace(RunPace.of(timeline)),
        "waiting_for_data": _waiting(detail),
        "losses": [_curve(curve) for curve in loss_curves(timeline)],
        "metrics": [_curve(curve) for curve in metric_curves(timeline)],
        "events": _events(timeline),
        "recoveries": [recovery.to_dict() for recovery in timeline.recoveries],
        "checkpoints": [_checkpoint(each) for each in detail.checkpoints],
        "job": None if detail.job is None else [_job_value(each) for each in job_values(detail.job)],
        "environment": detail.environment,
        "source": None if detail.source is None else {"main": detail.source.main, "files": sorted(detail.source.files)},
        "timing": None
        if timing is None
        else {
            "failure_timeout": timing.failure_timeout,
            "heartbeat_every": timing.heartbeat_every,
            "lease": timing.lease,
            "connect": timing.connect,
        },
    }
    plain: dict[str, Any] = finite(document)
    return plain


def checkpoints_document(found: CheckpointList, now: datetime) -> dict[str, Any]:
    """All checkpoints of a run, oldest first."""
    document: dict[str, Any] = finite(
        {
            "run": found.run,
            "folder": str(found.folder.absolute()),
            "checkpoints": [_kept_checkpoint(each, now) for each in found.checkpoints],
        }
    )
    return document


def difference_document(pair: RunPair) -> dict[str, Any]:
    """Two runs side by side."""
    parting, weights = pair.comparison.parting, pair.weights
    return {
        "left": pair.left.folder.name,
        "right": pair.right.folder.name,
        "keys": [
            {"key": change.key, "mark": change.mark.value} | _sides((_plain(change.before), _plain(change.after)))
            for change in pair.keys
        ],
        "environment": {name: _sides(both) for name, both in pair.environment.items()},
        "source": pair.source,
        "metrics": {name: _sides(both) for name, both in pair.metrics.items()},
        "weights_digest": _sides(weights),
        "same_weights": None if None in weights else weights[0] == weights[1],
        "common_steps": pair.comparison.common_steps,
        "parting": None if parting is None else _parting_document(parting),
    }


def written(time: datetime | None) -> str | None:
    """A time as JSON holds it, in ISO 8601."""
    return None if time is None else time.isoformat(timespec="milliseconds")


def _events(timeline: Timeline) -> dict[str, Any]:
    return {
        "counts": timeline.counts,
        "redone_steps": timeline.redone,
        "unreadable_lines": timeline.unreadable_lines,
        "began": written(moment(timeline.began)),
        "ended": written(moment(timeline.ended)),
        "evaluations": [{"step": step, "metrics": metrics} for step, metrics in timeline.evaluations.items()],
        "generations": [
            {
                "generation": event.generation,
                "time": written(moment(event.time)),
                "from_step": event.from_step,
                "members": plain(event.members),
            }
            for event in timeline.of_kind(GenerationFormed)
        ],
        "losses": [
            {
                "worker": event.worker,
                "step": event.step,
                "phase": event.phase,
                "message": event.message,
                "time": written(moment(event.time)),
            }
            for event in timeline.of_kind(WorkerLost)
        ],
        "stops": [
            {"reason": event.reason, "time": written(moment(event.time))} for event in timeline.of_kind(RunStopped)
        ],
        "failures": [
            {"message": event.failure.message, "step": event.step, "time": written(moment(event.time))}
            for event in timeline.of_kind(RunFailed)
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    (least_step, least), (greatest_step, greatest) = curve.least, curve.greatest
    return {
        "name": curve.name,
        "count": len(curve.points),
        "first": curve.first,
        "last": curve.last,
        "least": {"value": least, "step": least_step},
        "greatest": {"value": greatest, "step": greatest_step},
    }


def _pace(pace: RunPace | None) -> dict[str, Any] | None:
    return None if pace is None else asdict(pace)


def _waiting(detail: RunDetail) -> dict[str, Any] | None:
    wait = detail.timeline.waiting
    if not wait.step_s:
        return None
    return {"share": round(wait.share, 4), "seconds": wait.waited_s, "advice": detail.advice_on_waiting}


def _checkpoint(checkpoint: CheckpointRecord) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "evaluated": checkpoint.evaluated,
        "bytes": checkpoint.bytes,
        "created": checkpoint.created or None,
        "weights_digest": checkpoint.weights_digest or None,
        "problem": checkpoint.problem or None,
    }


def _job_value(each: JobValue) -> dict[str, Any]:
    return {"key": each.key, "value": each.value, "origin": each.origin, "mark": each.mark.value}


def _kept_checkpoint(each: Kept, now: datetime) -> dict[str, Any]:
    record = each.record
    age = each.age(now)
    return {
        "name": record.name,
        "path": str(each.path.absolute()),
        "step": each.step,
        "evaluated": record.evaluated,
        "bytes": record.bytes,
        "created": record.created or None,
        "age_seconds": None if age is None else round(age, 3),
        "metrics": record.metrics,
        "weights_digest": record.weights_digest or None,
        "best": each.is_best,
        "encrypted": record.encrypted,
        "kept": [reason.value for reason in each.because],
        "problem": record.problem or None,
        "foreign": record.foreign or None,
    }


def _parting_document(parting: Parting) -> dict[str, Any]:
    return {"step": parting.step, "values": {name: _sides(both) for name, both in parting.values.items()}}


def _sides(pair: Pair) -> dict[str, Any]:
    return {"left": pair[0], "right": pair[1]}


def _plain(value: Any) -> Any:
    return None if value is Absent.NOT_GIVEN else value
