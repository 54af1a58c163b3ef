"""The metrics of a job for Prometheus: their names, help texts and values. The only module that imports
prometheus_client.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quorate.core.generation import cell_of
from quorate.core.worker_status import APPLY, COMPUTE, DATA, EXCHANGE
from quorate.observe.events import BlocksPlaced, LinksMeasured, StepCompleted, SystemSampled
from quorate.observe.recoveries import CAUSES

PHASES = (DATA, COMPUTE, EXCHANGE, APPLY)
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MOST_NAMES = 100
"""So many names of the task's own are shown in a family; a task that makes up more is not followed."""


class Distribution:
    """How many values lay below each of the bounds, and their sum."""

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.total = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with how many values were not above it; the last is all of them."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))


class NamedNumbers:
    """The last number of each name that the task has made up."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def update(self, told: Mapping[str, object]) -> None:
        """What is no number is not shown."""
        for name, number in told.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and (name in self.last or len(self.last) < MOST_NAMES):
                self.last[name] = cast(float, number)


class StepSums:
    """Fed by one thread, and read by another: sums of a moment may differ by a step."""

    def __init__(self) -> None:
        self.count = self.samples = self.skipped = self.overflowed = self.bad = 0
        self.position = self.in_generation = 0
        self.waited = 0.0
        self.last: StepCompleted | None = None
        self.progressed = time.time()
        self.seconds = Distribution()
        self.by_phase = {phase: Distribution() for phase in PHASES}
        self.losses, self.learning_rates, self.gradient_norms = NamedNumbers(), NamedNumbers(), NamedNumbers()
        self.logged = NamedNumbers()
        self._phases = tuple(self.by_phase.values())

    def add(self, event: StepCompleted) -> None:
        seconds = (event.data_s or 0.0, event.compute_s or 0.0, event.exchange_s or 0.0, event.apply_s or 0.0)
        for distribution, took in zip(self._phases, seconds, strict=True):
            distribution.add(took)
        self.seconds.add(sum(seconds))
        self.waited += max(0.0, seconds[0], event.longest_data_s or 0.0)
        self.samples += event.samples or 0
        self.bad += event.bad_samples
        self.skipped += event.skipped is not None and not event.skipped.partial
        self.overflowed += event.overflow
        self.losses.update(event.losses)
        self.learning_rates.update(event.learning_rates)
        self.gradient_norms.update(event.gradient_norms)
        if event.log:
            self.logged.update(event.log)
        self.last = event
        self.position = event.step or 0
        self.count += 1
        self.in_generation += 1
        self.progressed = time.time()

    def note_progress(self) -> None:
        """The job has got further, if not by a step."""
        self.progressed = time.time()


PREFIX = "quorate_"
MOST_SERVERS = 64
"""At most so many servers are shown: each is a series of its own."""
MOST_GPUS = 64
"""At most so many GPUs of a host are shown."""

UPDATE_BOUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
"""Updates that come between a pull and a push: a few more than there are workers."""

LONG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

Reading = tuple[str, str, Callable[[Any], float | None]]
"""A metric from the last sample of a worker, a machine or a GPU: name, help text, and how to read its value."""


def _percent(field: str) -> Callable[[Any], float | None]:
    return lambda load: None if (value := getattr(load, field)) is None else value / 100


def _plain(field: str) -> Callable[[Any], float | None]:
    return lambda load: getattr(load, field)


OF_WORKERS: tuple[Reading, ...] = (
    ("worker_cpu_ratio", "CPU that a worker's process uses; 1 is one core.", _percent("cpu_percent")),
    ("worker_memory_bytes", "Resident memory of a worker's process.", _plain("memory_bytes")),
    ("worker_threads", "Threads of a worker's process.", _plain("threads")),
)
OF_DEVICES: tuple[Reading, ...] = (
    (
        "worker_gpu_memory_bytes",
        "Peak GPU memory allocated by a worker's tensors since the last sample.",
        _plain("allocated_bytes"),
    ),
    (
        "worker_gpu_memory_reserved_bytes",
        "Peak GPU memory reserved by a worker since the last sample, with PyTorch's cache.",
        _plain("reserved_bytes"),
    ),
    ("worker_gpu_memory_total_bytes", "Memory of the GPU of a worker.", _plain("total_bytes")),
)
OF_MACHINES: tuple[Reading, ...] = (
    ("machine_cpu_ratio", "CPU use of the machine; 1 is all cores.", _percent("cpu_percent")),
    ("machine_memory_used_bytes", "Memory of the machine, or of its container, in use.", _plain("memory_used_bytes")),
    ("machine_memory_total_bytes", "Memory of the machine, or of its container.", _plain("memory_total_bytes")),
    ("machine_disk_free_bytes", "Free space of the disk with the run folder.", _plain("disk_free_bytes")),
    ("machine_disk_total_bytes", "Size of the disk with the run folder.", _plain("disk_total_bytes")),
)
TRAFFIC = {
    "network_received": "Bytes received over the network (not loopback).",
    "network_sent": "Bytes sent over the network (not loopback).",
    "disk_read": "Bytes read from disks.",
    "disk_written": "Bytes written to disks.",
}
"""What is counted of a machine, from its first sample on."""
OF_GPUS: tuple[Reading, ...] = (
    ("gpu_use_ratio", "Utilization of the GPU; 1 is all of the time.", _percent("use_percent")),
    ("gpu_memory_used_bytes", "Memory of the GPU in use.", _plain("memory_used_bytes")),
    ("gpu_memory_total_bytes", "Memory of the GPU.", _plain("memory_total_bytes")),
    ("gpu_temperature_celsius", "Temperature of the GPU.", _plain("temperature_celsius")),
    ("gpu_power_watts", "Power that the GPU draws.", _plain("power_watts")),
)


class Metrics:
    """The values of all metrics, kept from one event to the next: counts of steps, and the last sample of each worker
    and link.

    Causes and phases exist from the start: a counter that appears only with its first event does not show as an
    increase. All metrics have the label `run` and those given with it, which are added when they are shown.
    """

    def __init__(self, run: str, **labels: str) -> None:
        self._labels = {"run": run, **labels}
        self.steps = StepSums()
        self.validation = NamedNumbers()
        # Only of jobs that apply units of work one by one.
        self.placed: BlocksPlaced | None = None
        self.late: Distribution | None = None
        self.gap = 0
        # Bytes by worker of generations that are over; of the one at work there are links.
        self.passed: dict[int, int] = {}
        self.systems: dict[int, SystemSampled] = {}
        # Bytes by what is counted, and by host.
        self.traffic: dict[str, dict[str, float]] = {}
        self.links: dict[int, LinksMeasured] = {}
        self.dropped: Callable[[], int] = lambda: 0
        self._registry = CollectorRegistry()
        counter: Callable[..., Any] = partial(Counter, registry=self._registry)
        gauge: Callable[..., Any] = partial(Gauge, registry=self._registry)
        histogram: Callable[..., Any] = partial(Histogram, registry=self._registry)
        name = PREFIX.__add__

        self.up = gauge(name("up"), "1 while the job runs, 0 once it has ended.")
        self.failed = gauge(name("job_failed"), "1 once the job has failed; 0 if it runs, is complete or was stopped.")
        self.job_info = gauge(
            name("job_info"), "What the job is; always 1.", ["name", "task", "lanes", "strategy", "links"]
        )
        self.planned_steps = gauge(name("planned_steps"), "The last step of the job.")

        self.generation = gauge(name("generation"), "Number of the current generation.")
        self.incarnation = gauge(
            name("coordinator_number"), "Number of the coordinator that has declared the generation."
        )
        workers = gauge(
            name("workers"), "Workers that take part (alive), and that the job should have (wanted).", ["state"]
        )
        self.alive, self.wanted = workers.labels("alive"), workers.labels("wanted")
        self.lost = counter(name("workers_lost_total"), "Workers that were lost, by cause.", ["cause"])
        self.recoveries = counter(
            name("recoveries_total"), "Lost workers after which a new step was completed, by cause.", ["cause"]
        )
        self.recovery_seconds = histogram(
            name("recovery_seconds"),
            "Seconds from the first sign of a lost worker to the next new step, of each by itself.",
            ["cause"],
            buckets=LONG_BUCKETS,
        )
        for cause in CAUSES:
            for metric in (self.lost, self.recoveries, self.recovery_seconds):
                metric.labels(cause)

        self.checkpoints = counter(name("checkpoints_total"), "Saved checkpoints.")
        self.checkpoint_failures = counter(name("checkpoint_failures_total"), "Checkpoints that could not be saved.")
        self.checkpoint_seconds = histogram(
            name("checkpoint_seconds"), "Seconds from the start of a save to its commit.", buckets=LONG_BUCKETS
        )
        self.checkpoint_wait = counter(
            name("checkpoint_wait_seconds_total"), "Seconds for which training waited for saves."
        )
        self.checkpoint_bytes = gauge(name("checkpoint_bytes"), "Size of the last checkpoint.")
        self.checkpoint_step = gauge(name("checkpoint_step"), "The step of the last checkpoint.")
        self.checkpoint_time = gauge(
            name("checkpoint_timestamp_seconds"), "When the last checkpoint was saved; 0 if none was."
        )
        self.checkpoint_failure_time = gauge(
            name("checkpoint_failure_timestamp_seconds"), "When a checkpoint last failed to be saved; 0 if none did."
        )
        self.copies = counter(name("checkpoint_copies_total"), "Copies of checkpoints in other places (checkpoint.to).")
        self.copy_failures = counter(name("checkpoint_copy_failures_total"), "Copies that failed; they are retried.")

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that is accepted, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value."""
        of_job = (*self._of_steps(), *self._of_servers(), *self._of_exchange())
        for family in (*self._registry.collect(), *of_job, *self._last_words()):
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in samples]
            if samples:
                yield family

    def _of_steps(self) -> Iterator[Metric]:
        steps, last = self.steps, self.steps.last
        yield _gauge("last_step", "The last completed step.", steps.position)
        yield _gauge(
            "progress_timestamp_seconds",
            "When the job last made progress: a step, an evaluation, a checkpoint, or its start.",
            steps.progressed,
        )
        yield _counter("steps", "Steps completed since the launcher was started.", steps.count)
        yield _counter("steps_skipped", "Steps skipped because a loss was not finite.", steps.skipped)
        overflowed = "Steps skipped because their gradients overflowed float16."
        yield _counter("steps_overflowed", overflowed, steps.overflowed)
        yield _counter("samples", "Samples trained on.", steps.samples)
        yield _counter("bad_samples", "Bad training samples that were skipped.", steps.bad)
        waited = "Seconds that steps waited for the worker that got its data last."
        yield _counter("data_wait_seconds", waited, steps.waited)
        yield _histogram("step_seconds", "Duration of a step, in the worker of lane 0.", {"": steps.seconds})
        yield _histogram(
            "phase_seconds", "Duration of each phase of a step, in the worker of lane 0.", steps.by_phase, "phase"
        )
        yield _named("loss", "Training loss of the last step.", steps.losses, "optimizer")
        yield _named("learning_rate", "Learning rate that the last step has used.", steps.learning_rates, "optimizer")
        yield _named("gradient_norm", "Norm of the gradient of the last step.", steps.gradient_norms, "optimizer")
        yield _named("logged", "The last number that the task has logged under this name.", steps.logged, "name")
        yield _named("validation_metric", "The last evaluation of the validation set.", self.validation, "metric")
        if last is not None:
            yield _gauge("epoch", "The epoch of the last step, from 0.", last.epoch or 0)
            if last.loss_scale is not None:
                yield _gauge("loss_scale", "The loss scale with precision: fp16.", last.loss_scale)

        if self.late is not None:
            text = "Other updates between the pull and the push of a unit of work."
            yield _histogram("staleness_updates", text, {"": self.late})
            text = "The most steps that a unit was started ahead of the oldest unapplied one, since the last boundary."
            yield _gauge("staleness_gap_steps", text, self.gap)

    def _of_servers(self) -> Iterator[Metric]:
        """Only of jobs that have any."""
        if self.placed is None:
            return
        yield _gauge("servers", "Parameter servers.", len(self.placed.servers))
        held = self.placed.servers[:MOST_SERVERS]
        for metric, text, numbers in (
            ("server_blocks", "Parameters that a server holds.", [one.blocks for one in held]),
            ("server_bytes", "Bytes of the parameters that a server holds.", [one.bytes for one in held]),
        ):
            family = GaugeMetricFamily(f"{PREFIX}{metric}", text, labels=["server"])
            for one, number in zip(held, numbers, strict=True):
                family.add_metric([cell_of(one.server).removeprefix("server ")], number)
            yield family

    def _of_exchange(self) -> Iterator[Metric]:
        links, passed = dict(self.links), self.bytes_passed()
        sent = CounterMetricFamily(
            f"{PREFIX}exchange_bytes",
            "Bytes of gradients that a worker has sent to others, over the network or in shared memory.",
            labels=["worker"],
        )
        for worker, size in passed.items():
            sent.add_metric([str(worker)], size)
        yield sent
        latency = GaugeMetricFamily(
            f"{PREFIX}link_latency_seconds",
            "Round trip to the next worker, when the generation began.",
            labels=["worker", "peer"],
        )
        for worker, link in links.items():
            if link.peer is not None and link.round_trip_s is not None:
                latency.add_metric([str(worker), str(link.peer)], link.round_trip_s)
        yield latency

    def bytes_passed(self) -> dict[int, int]:
        """By worker, so far."""
        links, steps = dict(self.links), self.steps.in_generation
        now = {worker: (link.bytes_per_step or 0) * steps for worker, link in links.items()}
        return {worker: self.passed.get(worker, 0) + now.get(worker, 0) for worker in sorted({*self.passed, *now})}

    def _last_words(self) -> Iterator[Metric]:
        """Made anew for each scrape: what is gone leaves nothing behind."""
        systems = dict(self.systems)
        yield from _families(OF_WORKERS, [((str(one), said.host), said) for one, said in systems.items()], "worker")
        placed = {(str(one), said.host): said.device_memory for one, said in systems.items()}
        yield from _families(OF_DEVICES, [(place, use) for place, use in placed.items() if use is not None], "worker")
        # Several may have spoken for one machine, one after the other.
        in_order = sorted(systems.values(), key=lambda said: said.time)
        hosts = {said.host: said for said in in_order if said.machine is not None}
        yield from _families(OF_MACHINES, [((host,), said.machine) for host, said in hosts.items()])
        for name, text in TRAFFIC.items():
            family = CounterMetricFamily(f"{PREFIX}machine_{name}_bytes", text, labels=["host"])
            for host, size in dict(self.traffic.get(name, {})).items():
                if host in hosts:
                    family.add_metric([host], size)
            yield family
        gpus = [((str(gpu.index), host), gpu) for host, said in hosts.items() for gpu in said.gpus[:MOST_GPUS]]
        yield from _families(OF_GPUS, list(dict(gpus).items()), "gpu")
        yield _counter(
            "events_dropped", "Events missing from these metrics because too many came at once.", self.dropped()
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value)


def _named(name: str, text: str, numbers: NamedNumbers, label: str) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[label])
    for each, number in dict(numbers.last).items():
        family.add_metric([each], number)
    return family


def _histogram(name: str, text: str, values: Mapping[str, Distribution], *labels: str) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=labels)
    for each, distribution in values.items():
        family.add_metric([each] if labels else [], distribution.buckets(), distribution.total)
    return family


def _families(
    readings: Sequence[Reading], said: Sequence[tuple[tuple[str, ...], Any]], *labels: str
) -> Iterator[Metric]:
    for name, text, read in readings:
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[*labels, "host"])
        for values, load in said:
            if (number := read(load)) is not None:
                family.add_metric(list(values), number)
        yield family
