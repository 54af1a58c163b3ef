"""Everything about one run as a document for programs."""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from quorate.cli.run_document import record_document, written
from quorate.core.finite import finite
from quorate.history.checkpoint_list import CheckpointRecord, nearest_saved
from quorate.history.run_detail import Advice, JobValue, RunDetail, job_values
from quorate.history.run_record import moment
from quorate.history.timeline import Curve, RunPace, Timeline, loss_curves, metric_curves
from quorate.observe.event import plain
from quorate.observe.events import GenerationFormed, RunFailed, RunStopped, WorkerLost


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
