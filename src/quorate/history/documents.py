"""What is known of runs as JSON documents, for whoever shows them: the command line's `--json`, or a web page.

Each is described by a schema in docs/json. Whoever writes one down writes null for a number that is not finite. Those
of the ledger and of the progress in shards stand with their things: they need numpy, which takes long to import.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from quorate.checkpoint.retention import Reason
from quorate.history.difference import Pair, RunPair
from quorate.history.run_detail import Advice, CheckpointList, CheckpointRecord, RunDetail, job_values, nearest_saved
from quorate.history.run_record import Listing, RunRecord, moment
from quorate.history.timeline import Curve, RunPace, Timeline, logged_curves, loss_curves, metric_curves
from quorate.history.traces import Trace, WorkerTime
from quorate.observe.event import plain
from quorate.observe.events import GenerationFormed, RunFailed, RunStopped, WorkerLost
from quorate.observe.quantities import plural
from quorate.observe.seldom_events import GradientsCompressed, StalenessObserved
from quorate.spec.keys import Absent


def runs_document(listing: Listing, now: datetime, searches: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A list of runs: those shown, how many fit the query, and how many there are; and the searches beside them."""
    return {
        "folder": str(listing.folder.absolute()),
        "total": len(listing.records),
        "fitting": len(listing.fitting),
        "runs": [_record(record, now) for record in listing.shown],
        "searches": list(searches),
    }


def _record(record: RunRecord, now: datetime) -> dict[str, Any]:
    best = record.best
    return {
        "run": record.name,
        "folder": str(record.path.absolute()),
        "status": record.status.value,
        **_given(record, "reason", "ending", "weights_digest", "task"),
        **_fields(record, "steps", "total_steps", "samples_per_second", "wall_seconds", "lanes", "workers"),
        "best": None if best is None else {"metric": best.watched.metric, "value": best.value, "step": best.step},
        "final_metrics": record.metrics,
        "created": _written(record.created),
        "ended": _written(record.ended),
        "age_seconds": round(record.age(now), 3),
        "failure": None if record.failure is None else record.failure.to_dict(),
    }


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _given(value: object, *names: str) -> dict[str, Any]:
    """The same with null for what is empty."""
    return {name: getattr(value, name) or None for name in names}


def detail_document(detail: RunDetail, advice: Advice | None, now: datetime) -> dict[str, Any]:
    """Everything about one run."""
    record, timeline, timing = detail.record, detail.timeline, detail.timing
    launcher, wait, pace, identity = record.launcher, timeline.waiting, RunPace.of(timeline), detail.identity
    staleness = Staleness.of(timeline.of_kind(StalenessObserved))
    document = _record(record, now)
    if record.best is not None:
        document["best"] |= {"nearest_saved": nearest_saved(record.best.step, detail.checkpoints)}
    waiting = {"share": round(wait.share, 4), "seconds": wait.waited_s, "advice": detail.advice_on_waiting}
    return document | {
        "next": None if advice is None else asdict(advice),
        "problems": list(detail.problems),
        "launcher_pid": None if launcher is None else launcher.pid,
        "coordinator": None if launcher is None else detail.address,
        "active_seconds": round(timeline.active_seconds, 3),
        "pace": None if pace is None else asdict(pace),
        "waiting_for_data": waiting if wait.step_s else None,
        "compression": _compression(timeline),
        "losses": [_curve(curve) for curve in loss_curves(timeline)],
        "logged": [_curve(curve) for curve in logged_curves(timeline)],
        "metrics": [_curve(curve) for curve in metric_curves(timeline)],
        "events": _events(timeline),
        "recoveries": [recovery.to_dict() for recovery in timeline.recoveries],
        "staleness": None if staleness is None else staleness.to_dict(),
        "checkpoints": [_checkpoint(each) for each in detail.checkpoints],
        "job": None if detail.job is None else [asdict(each) for each in job_values(detail.job)],
        "environment": detail.environment,
        "identity": identity and {"digest": identity.digest, **asdict(identity)},
        "source": None if detail.source is None else {"main": detail.source.main, "files": sorted(detail.source.files)},
        "timing": None if timing is None else _fields(timing, "failure_timeout", "heartbeat_every", "lease", "connect"),
    }


def _compression(timeline: Timeline) -> dict[str, Any] | None:
    told = timeline.of_kind(GradientsCompressed)
    if not told:
        return None
    last = told[-1]
    received_dense = last.sent_bytes_dense if last.received_bytes_dense is None else last.received_bytes_dense
    names = ("step", "lane_bytes", "lane_bytes_dense", "sent_bytes", "sent_bytes_dense", "received_bytes")
    return _fields(last, *names) | {"received_bytes_dense": received_dense}


def trace_document(run: str, traces: list[Trace], chrome: str | None) -> dict[str, Any]:
    """Where the time of traced steps went, oldest first; `chrome` is the file that was written of them."""
    return {
        "run": run,
        "chrome": chrome,
        "traces": [
            {
                "trace_id": trace.id,
                **_fields(trace, "step", "generation"),
                "spans": len(trace.spans),
                "workers": [_worker_time(worker) for worker in trace.workers],
                "recovery": [
                    {"name": span.name, "start": span.start, "seconds": span.seconds, **span.attributes}
                    for span in trace.recovery
                ],
            }
            for trace in traces
        ],
    }


def _worker_time(worker: WorkerTime) -> dict[str, Any]:
    names = ("worker", "seconds", "phases", "clock_offset", "clock_uncertainty")
    return _fields(worker, *names) | {"covered": round(worker.covered, 4)}


def checkpoints_document(found: CheckpointList, now: datetime) -> dict[str, Any]:
    """All checkpoints of a run, oldest first."""
    folder = found.folder.absolute()
    return {
        "run": found.run,
        "folder": str(folder),
        "checkpoints": [
            {
                **_checkpoint(each),
                **_given(each, "foreign"),
                **_fields(each, "metrics", "encrypted"),
                "path": str(folder / "checkpoints" / each.name),
                "step": each.named_step,
                "age_seconds": None if (age := each.age(now)) is None else round(age, 3),
                "best": Reason.BEST in each.because,
                "kept": list(each.because),
            }
            for each in found.checkpoints
        ],
    }


def difference_document(pair: RunPair) -> dict[str, Any]:
    """Two runs side by side."""
    parting, weights = pair.comparison.parting, pair.weights
    return {
        "left": pair.left.folder.name,
        "right": pair.right.folder.name,
        "keys": [
            {"key": change.key, "mark": change.mark} | _sides((_plain(change.before), _plain(change.after)))
            for change in pair.keys
        ],
        "environment": {name: _sides(both) for name, both in pair.environment.items()},
        "source": pair.source,
        "metrics": {name: _sides(both) for name, both in pair.metrics.items()},
        "logged": {name: _sides(both) for name, both in pair.logged.items()},
        "weights_digest": _sides(weights),
        "same_weights": None if None in weights else weights[0] == weights[1],
        "common_steps": pair.comparison.common_steps,
        "divergence": None
        if parting is None
        else {
            "step": parting.step,
            "values": {name: _sides(both) for name, both in parting.values.items()},
            "lane": parting.lane,
            "tensor": parting.tensor,
        },
    }


def _written(time: datetime | float | None) -> str | None:
    """A time as JSON holds it, in ISO 8601."""
    at = time if isinstance(time, datetime) else moment(time)
    return None if at is None else at.isoformat(timespec="milliseconds")


def _events(timeline: Timeline) -> dict[str, Any]:
    return {
        "counts": timeline.counts,
        "redone_steps": timeline.redone,
        "unreadable_lines": timeline.unreadable_lines,
        "began": _written(timeline.began),
        "ended": _written(timeline.ended),
        "evaluations": [{"step": step, "metrics": metrics} for step, metrics in timeline.evaluations.items()],
        "generations": [
            _fields(event, "generation", "from_step") | {"time": _written(event.time), "members": plain(event.members)}
            for event in timeline.of_kind(GenerationFormed)
        ],
        "losses": [
            _fields(event, "worker", "step", "phase", "message") | {"time": _written(event.time)}
            for event in timeline.of_kind(WorkerLost)
        ],
        "stops": [{"reason": event.reason, "time": _written(event.time)} for event in timeline.of_kind(RunStopped)],
        "failures": [
            {"message": event.failure.message, "step": event.step, "time": _written(event.time)}
            for event in timeline.of_kind(RunFailed)
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    (least_step, least), (greatest_step, greatest) = curve.least, curve.greatest
    return {
        "name": curve.name,
        "count": len(curve.steps),
        "first": curve.first,
        "last": curve.last,
        "min": {"value": least, "step": least_step},
        "max": {"value": greatest, "step": greatest_step},
    }


def _checkpoint(checkpoint: CheckpointRecord) -> dict[str, Any]:
    told = _fields(checkpoint, "name", "step", "evaluated", "bytes")
    return told | _given(checkpoint, "created", "weights_digest", "problem")


def _sides(pair: Pair) -> dict[str, Any]:
    return {"left": pair[0], "right": pair[1]}


def _plain(value: Any) -> Any:
    return None if value is Absent.NOT_GIVEN else value


@dataclass
class Staleness:
    """All that was observed: how many units came with how many updates of others between their pull and their push.

    `gap` is how many steps ahead of the oldest unapplied one a unit was begun at most, `bound` how many are allowed.
    """

    updates: Counter[int] = field(default_factory=Counter)
    gap: int = 0
    bound: int | None = None

    @classmethod
    def of(cls, events: Iterable[StalenessObserved]) -> "Staleness | None":
        """What these tell together; None where there are none."""
        total: Staleness | None = None
        for event in events:
            total = total or cls()
            for updates, units in event.updates.items():
                total.updates[int(updates)] += units
            total.gap, total.bound = max(total.gap, event.gap), event.bound
        return total

    @property
    def mean(self) -> float:
        units = sum(self.updates.values())
        return sum(late * count for late, count in self.updates.items()) / units if units else 0.0

    @property
    def most(self) -> int:
        return max(self.updates, default=0)

    def in_words(self) -> str:
        allowed = "" if self.bound is None else f" of {self.bound} allowed"
        late = f"updates came {self.mean:.1f} others late, at most {self.most}"
        return f"{late}; begun at most {plural(self.gap, 'step')}{allowed} ahead"

    def to_dict(self) -> dict[str, Any]:
        """As `quorate show --json` prints it."""
        updates = {str(late): units for late, units in sorted(self.updates.items())}
        return {"updates": updates, "mean": round(self.mean, 3), "gap": self.gap, "bound": self.bound}
