"""The metrics of a job for Prometheus: their names, help texts and values, and what each event does to them. The only
module that imports prometheus_client.

Labels have few values, whatever a job tells: the places of its workers, hosts and GPUs that are there now, causes and
phases of closed sets, and so many names of the task's own at most.
"""

import time
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from quorate.core.generation import APPLY, COMPUTE, DATA, EXCHANGE, cell_of
from quorate.observe import events
from quorate.observe.event import Event
from quorate.observe.recoveries import CAUSES, RecoveryLog, brief, cause_of
from quorate.observe.seldom_events import StalenessObserved, SystemSampled
from quorate.spec.job import JobSpec

PREFIX = "quorate_"
PHASES = (DATA, COMPUTE, EXCHANGE, APPLY)
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LONG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
UPDATE_BOUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
"""Updates that come between a pull and a push: a few more than there are workers."""
MOST_NAMES = 100
"""So many names of the task's own are shown in a family; a task that makes up more is not followed."""
MOST_SERVERS = 64
"""At most so many servers are shown: each is a series of its own."""
MOST_GPUS = 64
"""At most so many GPUs of a host are shown."""

Reading = tuple[str, str, str, int]
"""A metric from the last sample of a worker, a machine or a GPU: its name, its help text, and the field that it is of,
divided by a number."""

OF_WORKERS: tuple[Reading, ...] = (
    ("worker_cpu_ratio", "CPU that a worker's process uses; 1 is one core.", "cpu_percent", 100),
    ("worker_memory_bytes", "Resident memory of a worker's process.", "memory_bytes", 1),
    ("worker_threads", "Threads of a worker's process.", "threads", 1),
)
OF_DEVICES: tuple[Reading, ...] = (
    (
        "worker_gpu_memory_bytes",
        "Peak GPU memory allocated by a worker's tensors since the last sample.",
        "allocated_bytes",
        1,
    ),
    (
        "worker_gpu_memory_reserved_bytes",
        "Peak GPU memory reserved by a worker since the last sample, with PyTorch's cache.",
        "reserved_bytes",
        1,
    ),
    ("worker_gpu_memory_total_bytes", "Memory of the GPU of a worker.", "total_bytes", 1),
)
OF_MACHINES: tuple[Reading, ...] = (
    ("machine_cpu_ratio", "CPU use of the machine; 1 is all cores.", "cpu_percent", 100),
    ("machine_memory_used_bytes", "Memory of the machine, or of its container, in use.", "memory_used_bytes", 1),
    ("machine_memory_total_bytes", "Memory of the machine, or of its container.", "memory_total_bytes", 1),
    ("machine_disk_free_bytes", "Free space of the disk with the run folder.", "disk_free_bytes", 1),
    ("machine_disk_total_bytes", "Size of the disk with the run folder.", "disk_total_bytes", 1),
)
TRAFFIC = {
    "network_received": "Bytes received over the network (not loopback).",
    "network_sent": "Bytes sent over the network (not loopback).",
    "disk_read": "Bytes read from disks.",
    "disk_written": "Bytes written to disks.",
}
"""What is counted of a machine, from its first sample on."""
OF_GPUS: tuple[Reading, ...] = (
    ("gpu_use_ratio", "Utilization of the GPU; 1 is all of the time.", "use_percent", 100),
    ("gpu_memory_used_bytes", "Memory of the GPU in use.", "memory_used_bytes", 1),
    ("gpu_memory_total_bytes", "Memory of the GPU.", "memory_total_bytes", 1),
    ("gpu_temperature_celsius", "Temperature of the GPU.", "temperature_celsius", 1),
    ("gpu_power_watts", "Power that the GPU draws.", "power_watts", 1),
)


class JobMetrics:
    """A sink that keeps the metrics of a job up to date. It is fed by one thread, and read by another.

    Causes and phases exist from the start: a counter that appears only with its first event does not show as an
    increase. All metrics have the label `run` and those given with it, which are added when they are shown.
    """

    def __init__(self, run: str, spec: JobSpec, workers: int, **labels: str) -> None:
        self.dropped: Callable[[], int] = lambda: 0
        self._labels = {"run": run, **labels}
        # A job may grow until every lane has a worker; spares have places of their own.
        self._places = max(spec.lanes, workers) + spec.spares
        self._members: frozenset[int] = frozenset()
        self._generation: str | None = None
        self._steps_in_generation = 0
        self._links: dict[int, events.LinksMeasured] = {}
        self._recovery_log = RecoveryLog()
        self._causes: dict[str, str] = {}
        self._recovered: Multiset[tuple[object, ...]] = Multiset()
        self._unrecovered = 0
        self._systems: dict[int, SystemSampled] = {}
        self._sampled: dict[str, float] = {}
        # Bytes by what is counted, and by host.
        self._traffic: dict[str, dict[str, float]] = {}
        self._registry = CollectorRegistry()
        self._seldom: dict[str, Gauge] = {}
        self._named: dict[str, dict[str, Gauge]] = {}
        self._takes: dict[type[Event], Callable[[Any], None]] = {
            events.RunBegan: self._take_run,
            events.StepCompleted: self._take_step,
            events.EvaluationDone: self._take_evaluation,
            events.GenerationFormed: self._take_generation,
            events.LinksMeasured: self._take_links,
            StalenessObserved: self._take_staleness,
            events.BlocksPlaced: self._take_placement,
            events.Resized: lambda event: self._wanted.set(event.workers or 0),
            events.WorkerLost: self._take_loss,
            SystemSampled: self._take_system,
            events.CheckpointSaved: self._take_checkpoint,
            events.CheckpointFailed: self._take_failed_save,
            events.CheckpointCopied: lambda _: self._copies.inc(),
            events.CopyFailed: lambda _: self._copy_failures.inc(),
            events.RunFinished: lambda _: self._up.set(0),
            events.RunFailed: self._take_failure,
        }
        self._make_of_job(spec, workers)
        self._make_of_steps()
        self._make_of_checkpoints()

    def _make_of_job(self, spec: JobSpec, workers: int) -> None:
        self._up = self._gauge("up", "1 while the job runs, 0 once it has ended.")
        self._failed = self._gauge("job_failed", "1 once the job has failed; 0 if it runs, is complete or was stopped.")
        labels = ("name", "task", "lanes", "strategy", "links")
        about = self._gauge("job_info", "What the job is; always 1.", *labels)
        about.labels(spec.name, spec.task.rpartition(":")[2], spec.lanes, spec.strategy.kind, spec.links).set(1)
        self._planned_steps = self._gauge("planned_steps", "The last step of the job.")
        self._generation_number = self._gauge("generation", "Number of the current generation.")
        self._incarnation = self._gauge(
            "coordinator_number", "Number of the coordinator that has declared the generation."
        )
        text = "Workers that take part (alive), and that the job should have (wanted)."
        taking_part = self._gauge("workers", text, "state")
        self._alive, self._wanted = taking_part.labels("alive"), taking_part.labels("wanted")
        self._up.set(1)
        self._wanted.set(workers)
        self._lost = self._counter("workers_lost", "Workers that were lost, by cause.", "cause")
        text = "Lost workers after which a new step was completed, by cause."
        self._recoveries = self._counter("recoveries", text, "cause")
        text = "Seconds from the first sign of a lost worker to the next new step, of each by itself."
        self._recovery_seconds = self._histogram("recovery_seconds", text, LONG_BUCKETS, "cause")
        for cause in CAUSES:
            for metric in (self._lost, self._recoveries, self._recovery_seconds):
                metric.labels(cause)
        text = "Bytes of gradients that a worker has sent to others, over the network or in shared memory."
        self._sent = self._counter("exchange_bytes", text, "worker")
        text = "Round trip to the next worker, when the generation began."
        self._latency = self._gauge("link_latency_seconds", text, "worker", "peer")

    def _make_of_steps(self) -> None:
        self._last_step = self._gauge("last_step", "The last completed step.")
        text = "When the job last made progress: a step, an evaluation, a checkpoint, or its start."
        self._progressed = self._gauge("progress_timestamp_seconds", text)
        self._progressed.set_to_current_time()
        self._steps = self._counter("steps", "Steps completed since the launcher was started.")
        self._skipped = self._counter("steps_skipped", "Steps skipped because a loss was not finite.")
        text = "Steps skipped because their gradients overflowed float16."
        self._overflowed = self._counter("steps_overflowed", text)
        self._samples = self._counter("samples", "Samples trained on.")
        self._bad_samples = self._counter("bad_samples", "Bad training samples that were skipped.")
        text = "Seconds that steps waited for the worker that got its data last."
        self._data_wait = self._counter("data_wait_seconds", text)
        self._step_seconds = self._histogram("step_seconds", "Duration of a step, in the worker of lane 0.", BOUNDS)
        text = "Duration of each phase of a step, in the worker of lane 0."
        phases = self._histogram("phase_seconds", text, BOUNDS, "phase")
        self._phase_seconds = [phases.labels(phase) for phase in PHASES]
        self._loss = self._gauge("loss", "Training loss of the last step.", "optimizer")
        self._rate = self._gauge("learning_rate", "Learning rate that the last step has used.", "optimizer")
        self._norm = self._gauge("gradient_norm", "Norm of the gradient of the last step.", "optimizer")
        self._logged = self._gauge("logged", "The last number that the task has logged under this name.", "name")
        self._validation = self._gauge("validation_metric", "The last evaluation of the validation set.", "metric")
        # Only of jobs that apply units of work one by one.
        self._late: Histogram | None = None

    def _make_of_checkpoints(self) -> None:
        self._saved = self._counter("checkpoints", "Saved checkpoints.")
        self._save_failures = self._counter("checkpoint_failures", "Checkpoints that could not be saved.")
        text = "Seconds from the start of a save to its commit."
        self._save_seconds = self._histogram("checkpoint_seconds", text, LONG_BUCKETS)
        self._save_wait = self._counter("checkpoint_wait_seconds", "Seconds for which training waited for saves.")
        self._save_bytes = self._gauge("checkpoint_bytes", "Size of the last checkpoint.")
        self._save_step = self._gauge("checkpoint_step", "The step of the last checkpoint.")
        text = "When the last checkpoint was saved; 0 if none was."
        self._save_time = self._gauge("checkpoint_timestamp_seconds", text)
        text = "When a checkpoint last failed to be saved; 0 if none did."
        self._save_failure_time = self._gauge("checkpoint_failure_timestamp_seconds", text)
        self._copies = self._counter("checkpoint_copies", "Copies of checkpoints in other places (checkpoint.to).")
        self._copy_failures = self._counter("checkpoint_copy_failures", "Copies that failed; they are retried.")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, registry=self._registry, buckets=buckets)

    def _set(self, name: str, text: str, value: float, **labels: str) -> None:
        """Of a metric that not every job has."""
        if name not in self._seldom:
            self._seldom[name] = self._gauge(name, text, *labels)
        (self._seldom[name].labels(**labels) if labels else self._seldom[name]).set(value)

    # --- as it is read

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that is accepted, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value."""
        for family in (*self._registry.collect(), *self._last_words()):
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in samples]
            if samples:
                yield family

    def _last_words(self) -> Iterator[Metric]:
        """Made anew for each scrape: what is gone leaves nothing behind."""
        systems = dict(self._systems)
        yield from _families(OF_WORKERS, [((str(one), said.host), said) for one, said in systems.items()], "worker")
        placed = {(str(one), said.host): said.device_memory for one, said in systems.items()}
        yield from _families(OF_DEVICES, [(place, use) for place, use in placed.items() if use is not None], "worker")
        # Several may have spoken for one machine, one after the other.
        in_order = sorted(systems.values(), key=lambda said: said.time)
        hosts = {said.host: said for said in in_order if said.machine is not None}
        yield from _families(OF_MACHINES, [((host,), said.machine) for host, said in hosts.items()])
        for name, text in TRAFFIC.items():
            family = CounterMetricFamily(f"{PREFIX}machine_{name}_bytes", text, labels=["host"])
            for host, size in dict(self._traffic.get(name, {})).items():
                if host in hosts:
                    family.add_metric([host], size)
            yield family
        gpus = [((str(gpu.index), host), gpu) for host, said in hosts.items() for gpu in said.gpus[:MOST_GPUS]]
        yield from _families(OF_GPUS, list(dict(gpus).items()), "gpu")
        text = "Events missing from these metrics because too many came at once."
        yield CounterMetricFamily(f"{PREFIX}events_dropped", text, self.dropped())

    # --- as it is fed

    def close(self) -> None: ...

    def handle(self, event: Event) -> None:
        """Take an event; most kinds change nothing here."""
        take = self._takes.get(type(event))
        if take is not None:
            take(event)
        self._recovery_log.handle(event)
        if self._unrecovered and isinstance(event, events.StepCompleted):
            self._count_recoveries()

    def _take_run(self, event: events.RunBegan) -> None:
        self._planned_steps.set(event.total_steps or 0)
        self._last_step.set(event.from_step or 0)

    def _take_failure(self, event: events.RunFailed) -> None:
        """A job that somebody has stopped has not failed."""
        self._up.set(0)
        self._failed.set(int(event.failure.stopped is None))

    def _take_step(self, event: events.StepCompleted) -> None:
        seconds = (event.data_s or 0.0, event.compute_s or 0.0, event.exchange_s or 0.0, event.apply_s or 0.0)
        for histogram, took in zip(self._phase_seconds, seconds, strict=True):
            histogram.observe(took)
        self._step_seconds.observe(sum(seconds))
        self._data_wait.inc(max(0.0, seconds[0], event.longest_data_s or 0.0))
        self._samples.inc(event.samples or 0)
        if event.bad_samples:
            self._bad_samples.inc(event.bad_samples)
        if event.skipped is not None and not event.skipped.partial:
            self._skipped.inc()
        if event.overflow:
            self._overflowed.inc()
        self._show(self._loss, "loss", event.losses)
        self._show(self._rate, "learning_rate", event.learning_rates)
        self._show(self._norm, "gradient_norm", event.gradient_norms)
        self._show(self._logged, "logged", event.log or {})
        self._set("epoch", "The epoch of the last step, from 0.", event.epoch or 0)
        if event.loss_scale is not None:
            self._set("loss_scale", "The loss scale with precision: fp16.", event.loss_scale)
        for worker, link in self._links.items():
            self._sent.labels(worker).inc(link.bytes_per_step or 0)
        self._last_step.set(event.step or 0)
        self._steps.inc()
        self._steps_in_generation += 1
        self._progressed.set_to_current_time()

    def _show(self, gauge: Gauge, family: str, told: Mapping[str, object]) -> None:
        """The last number of each name that the task has made up; what is no number is not shown."""
        known = self._named.setdefault(family, {})
        for name, number in told.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and (name in known or len(known) < MOST_NAMES):
                if name not in known:
                    known[name] = gauge.labels(name)
                known[name].set(number)  # type: ignore[arg-type]

    def _take_evaluation(self, event: events.EvaluationDone) -> None:
        self._show(self._validation, "validation_metric", event.metrics or {})
        self._progressed.set_to_current_time()

    # --- workers

    def _take_generation(self, event: events.GenerationFormed) -> None:
        before, self._members = self._members, frozenset(each for each in event.workers if each < self._places)
        for gone in before - self._members:  # by a resize, say
            self._systems.pop(gone, None)
        self._generation, self._links, self._steps_in_generation = event.generation, {}, 0
        self._latency.clear()
        self._alive.set(len(self._members))
        incarnation, _, number = str(event.generation).partition(".")
        if incarnation.isdecimal() and number.isdecimal():
            self._incarnation.set(int(incarnation))
            self._generation_number.set(int(number))

    def _take_links(self, event: events.LinksMeasured) -> None:
        """They come with a heartbeat; steps of the same generation may have come before, and are counted from it on."""
        worker, peers = event.worker, (None, *self._members)
        if worker not in self._members or worker in self._links or event.generation != self._generation:
            return
        if event.peer in peers:
            self._links[worker] = event
            self._sent.labels(worker).inc((event.bytes_per_step or 0) * self._steps_in_generation)
            if event.peer is not None and event.round_trip_s is not None:
                self._latency.labels(worker, event.peer).set(event.round_trip_s)

    def _take_placement(self, event: events.BlocksPlaced) -> None:
        """Only of jobs that have servers."""
        self._set("servers", "Parameter servers.", len(event.servers))
        for gauge in (self._seldom.get("server_blocks"), self._seldom.get("server_bytes")):
            if gauge is not None:
                gauge.clear()
        for one in event.servers[:MOST_SERVERS]:
            server = cell_of(one.server).removeprefix("server ")
            self._set("server_blocks", "Parameters that a server holds.", one.blocks, server=server)
            self._set("server_bytes", "Bytes of the parameters that a server holds.", one.bytes, server=server)

    def _take_staleness(self, event: StalenessObserved) -> None:
        if self._late is None:
            text = "Other updates between the pull and the push of a unit of work."
            self._late = self._histogram("staleness_updates", text, UPDATE_BOUNDS)
        for updates, units in event.updates.items():
            for _ in range(units):
                self._late.observe(int(updates))
        text = "The most steps that a unit was started ahead of the oldest unapplied one, since the last boundary."
        self._set("staleness_gap_steps", text, event.gap)

    def _take_loss(self, event: events.WorkerLost) -> None:
        message = event.message or ""
        self._causes[brief(message)] = cause = cause_of(message)
        self._lost.labels(cause).inc()
        if event.worker is not None:
            self._unrecovered += 1
            self._members -= {event.worker}
            self._systems.pop(event.worker, None)
        self._alive.set(len(self._members))

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
            self._recoveries.labels(cause).inc()
            self._recovery_seconds.labels(cause).observe(seconds)

    def _take_system(self, event: SystemSampled) -> None:
        """Samples tell rates, of the time since the one before. Summed up nothing is lost between two scrapes."""
        if event.worker is None or event.worker >= self._places:
            return
        self._systems[event.worker] = event
        if event.machine is None:
            return
        seconds = max(0.0, event.time - self._sampled.get(event.host, event.time))
        self._sampled[event.host] = event.time
        for name in TRAFFIC:
            rate = getattr(event.machine, f"{name}_bytes_per_second")
            if rate is not None:
                counted = self._traffic.setdefault(name, {})
                counted[event.host] = counted.get(event.host, 0.0) + seconds * rate

    # --- checkpoints

    def _take_checkpoint(self, event: events.CheckpointSaved) -> None:
        self._saved.inc()
        self._save_seconds.observe(event.seconds or 0.0)
        self._save_wait.inc(max(0.0, event.added_s or 0.0))
        self._save_bytes.set(event.bytes or 0)
        self._save_step.set(event.step or 0)
        self._save_time.set(time.time())
        self._progressed.set_to_current_time()

    def _take_failed_save(self, _: events.CheckpointFailed) -> None:
        self._save_failures.inc()
        self._save_failure_time.set(time.time())


def _families(
    readings: Sequence[Reading], said: Sequence[tuple[tuple[str, ...], Any]], *labels: str
) -> Iterator[Metric]:
    for name, text, field, divisor in readings:
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[*labels, "host"])
        for values, load in said:
            if (number := getattr(load, field)) is not None:
                family.add_metric(list(values), number / divisor)
        yield family
