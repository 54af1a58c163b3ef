"""What each event does to a job's metrics.

Labels have few values, whatever a job tells: the places of its workers, hosts and GPUs that are there now, causes and
phases of closed sets, and so many names of the task's own at most.
"""

import time
from collections import Counter as Multiset
from collections.abc import Callable
from typing import Any

from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.recoveries import RecoveryLog, brief, cause_of
from quorate.spec.job import JobSpec
from quorate.tracking.metrics import TRAFFIC, UPDATE_BOUNDS, Distribution, Metrics


class MetricsSink:
    """Keeps the metrics of a job up to date."""

    def __init__(self, metrics: Metrics, spec: JobSpec, workers: int) -> None:
        # A job may grow until every lane has a worker; spares have places of their own.
        self._places = max(spec.lanes, workers) + spec.spares
        self._members: frozenset[int] = frozenset()
        self._generation: str | None = None
        self._recovery_log = RecoveryLog()
        self._causes: dict[str, str] = {}
        self._recovered: Multiset[tuple[object, ...]] = Multiset()
        self._unrecovered = 0
        self._sampled: dict[str, float] = {}
        self._metrics = metrics
        self._takes: dict[type[Event], Callable[[Any], None]] = {
            events.RunBegan: self._take_run,
            events.StepCompleted: metrics.steps.add,
            events.EvaluationDone: self._take_evaluation,
            events.GenerationFormed: self._take_generation,
            events.LinksMeasured: self._take_links,
            events.StalenessObserved: self._take_staleness,
            events.BlocksPlaced: self._take_placement,
            events.Resized: lambda event: metrics.wanted.set(event.workers or 0),
            events.WorkerLost: self._take_loss,
            events.SystemSampled: self._take_system,
            events.CheckpointSaved: self._take_checkpoint,
            events.CheckpointFailed: self._take_failed_save,
            events.CheckpointCopied: lambda _: metrics.copies.inc(),
            events.CopyFailed: lambda _: metrics.copy_failures.inc(),
            events.RunFinished: lambda _: metrics.up.set(0),
            events.RunFailed: self._take_failure,
        }
        metrics.up.set(1)
        metrics.wanted.set(workers)
        task = spec.task.rpartition(":")[2]
        metrics.job_info.labels(spec.name, task, spec.lanes, spec.strategy.kind, spec.links).set(1)

    def close(self) -> None: ...

    def handle(self, event: Event) -> None:
        """Take an event; most kinds change nothing here."""
        take = self._takes.get(type(event))
        if take is not None:
            take(event)
        self._recovery_log.handle(event)
        if self._unrecovered and isinstance(event, events.StepCompleted):
            self._count_recoveries()

    # --- training

    def _take_run(self, event: events.RunBegan) -> None:
        self._metrics.planned_steps.set(event.total_steps or 0)
        self._metrics.steps.position = event.from_step or 0

    def _take_failure(self, event: events.RunFailed) -> None:
        """A job that somebody has stopped has not failed."""
        self._metrics.up.set(0)
        self._metrics.failed.set(int(event.failure.stopped is None))

    def _take_evaluation(self, event: events.EvaluationDone) -> None:
        self._metrics.validation.update(event.metrics or {})
        self._metrics.steps.note_progress()

    # --- workers

    def _take_generation(self, event: events.GenerationFormed) -> None:
        metrics = self._metrics
        before, self._members = self._members, frozenset(each for each in event.workers if each < self._places)
        for gone in before - self._members:  # by a resize, say
            metrics.systems.pop(gone, None)
        self._generation = event.generation
        metrics.passed, metrics.links = metrics.bytes_passed(), {}
        metrics.steps.in_generation = 0
        metrics.alive.set(len(self._members))
        incarnation, _, number = str(event.generation).partition(".")
        if incarnation.isdecimal() and number.isdecimal():
            metrics.incarnation.set(int(incarnation))
            metrics.generation.set(int(number))

    def _take_links(self, event: events.LinksMeasured) -> None:
        """They come with a heartbeat; steps of the same generation may have come before, and are counted from it on."""
        worker, known = event.worker, self._metrics.links
        is_of_ours = event.generation == self._generation and event.peer in (None, *self._members)
        if worker in self._members and worker not in known and is_of_ours:
            known[worker] = event

    def _take_placement(self, event: events.BlocksPlaced) -> None:
        self._metrics.placed = event

    def _take_staleness(self, event: events.StalenessObserved) -> None:
        metrics = self._metrics
        metrics.late = metrics.late or Distribution(UPDATE_BOUNDS)
        for updates, units in event.updates.items():
            metrics.late.add(int(updates), units)
        metrics.gap = event.gap

    def _take_loss(self, event: events.WorkerLost) -> None:
        message = event.message or ""
        self._causes[brief(message)] = cause = cause_of(message)
        self._metrics.lost.labels(cause).inc()
        if event.worker is not None:
            self._unrecovered += 1
            self._members -= {event.worker}
            self._metrics.systems.pop(event.worker, None)
        self._metrics.alive.set(len(self._members))

    def _count_recoveries(self) -> None:
        """Those from which a new step has come by now, each once: what is known of one changes until its place is
        filled."""
        done = [one for one in self._recovery_log.recoveries if one.first_step_s is not None]
        known = Multiset(self._recovered)
        for one in done:
            key = (one.worker, one.step, one.cause, one.detect_s)
            if known[key]:
                known[key] -= 1
                continue
            self._recovered[key] += 1
            self._unrecovered -= 1
            cause, seconds = self._causes[one.cause], one.detect_s + one.reform_s + (one.first_step_s or 0.0)
            self._metrics.recoveries.labels(cause).inc()
            self._metrics.recovery_seconds.labels(cause).observe(seconds)

    def _take_system(self, event: events.SystemSampled) -> None:
        if event.worker is not None and event.worker < self._places:
            self._metrics.systems[event.worker] = event
            if event.machine is not None:
                self._count_traffic(event.host, event.time, event.machine)

    def _count_traffic(self, host: str, now: float, load: events.MachineLoad) -> None:
        """Samples tell rates, of the time since the one before. Summed up nothing is lost between two scrapes."""
        seconds = max(0.0, now - self._sampled.get(host, now))
        self._sampled[host] = now
        for name in TRAFFIC:
            rate = getattr(load, f"{name}_bytes_per_second")
            if rate is not None:
                counted = self._metrics.traffic.setdefault(name, {})
                counted[host] = counted.get(host, 0.0) + seconds * rate

    # --- checkpoints

    def _take_checkpoint(self, event: events.CheckpointSaved) -> None:
        metrics = self._metrics
        metrics.checkpoints.inc()
        metrics.checkpoint_seconds.observe(event.seconds or 0.0)
        metrics.checkpoint_wait.inc(max(0.0, event.added_s or 0.0))
        metrics.checkpoint_bytes.set(event.bytes or 0)
        metrics.checkpoint_step.set(event.step or 0)
        metrics.checkpoint_time.set(time.time())
        metrics.steps.note_progress()

    def _take_failed_save(self, _: events.CheckpointFailed) -> None:
        self._metrics.checkpoint_failures.inc()
        self._metrics.checkpoint_failure_time.set(time.time())
