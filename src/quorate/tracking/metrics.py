"""The table of a job's metrics: what each is called and means, and how all are shown. The only module that imports
prometheus_client.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quorate.core.generation import cell_of
from quorate.observe.events import BlocksPlaced, LinksMeasured, SystemSampled
from quorate.observe.recoveries import CAUSES
from quorate.tracking.step_sums import Distribution, NamedNumbers, StepSums

PREFIX = "quorate_"
MOST_SERVERS = 64
"""So many are told one by one: each is a series of its own."""
MOST_GPUS = 64
"""So many GPUs are shown of a host."""

UPDATE_BOUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
"""Updates that come between a pull and a push: a few more than there are workers."""

LONG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

Reading = tuple[str, str, Callable[[Any], float | None]]
"""What is shown of the last word about a worker, a machine or a GPU: name, help, and the number in it."""


def _percent(field: str) -> Callable[[Any], float | None]:
    return lambda load: None if (value := getattr(load, field)) is None else value / 100


def _plain(field: str) -> Callable[[Any], float | None]:
    return lambda load: getattr(load, field)


OF_WORKERS: tuple[Reading, ...] = (
    ("worker_cpu_ratio", "CPU that a worker's process uses; 1 is one core.", _percent("cpu_percent")),
    ("worker_memory_bytes", "Memory of a worker's process that is resident.", _plain("memory_bytes")),
    ("worker_threads", "Threads of a worker's process.", _plain("threads")),
)
OF_DEVICES: tuple[Reading, ...] = (
    (
        "worker_gpu_memory_bytes",
        "The most memory of its GPU that tensors of a worker have taken since the last sample.",
        _plain("allocated_bytes"),
    ),
    (
        "worker_gpu_memory_reserved_bytes",
        "The most memory of its GPU that a worker has had since the last sample, with what PyTorch keeps for later.",
        _plain("reserved_bytes"),
    ),
    ("worker_gpu_memory_total_bytes", "Memory of the GPU of a worker.", _plain("total_bytes")),
)
OF_MACHINES: tuple[Reading, ...] = (
    ("machine_cpu_ratio", "CPU of the machine that is in use; 1 is all of it.", _percent("cpu_percent")),
    ("machine_memory_used_bytes", "Memory of the machine, or of its container, in use.", _plain("memory_used_bytes")),
    ("machine_memory_total_bytes", "Memory that there is.", _plain("memory_total_bytes")),
    ("machine_disk_free_bytes", "Free space of the disk with the run folder.", _plain("disk_free_bytes")),
    ("machine_disk_total_bytes", "Size of the disk with the run folder.", _plain("disk_total_bytes")),
    *(
        (f"machine_{what}_bytes_per_second", f"Bytes {said} per second.", _plain(f"{what}_bytes_per_second"))
        for what, said in (
            ("network_received", "that came over the network (not loopback)"),
            ("network_sent", "that went over the network (not loopback)"),
            ("disk_read", "read from disks"),
            ("disk_written", "written to disks"),
        )
    ),
)
OF_GPUS: tuple[Reading, ...] = (
    ("gpu_use_ratio", "Part of the time in which the GPU was at work.", _percent("use_percent")),
    ("gpu_memory_used_bytes", "Memory of the GPU in use.", _plain("memory_used_bytes")),
    ("gpu_memory_total_bytes", "Memory of the GPU.", _plain("memory_total_bytes")),
    ("gpu_temperature_celsius", "Temperature of the GPU.", _plain("temperature_celsius")),
    ("gpu_power_watts", "Power that the GPU draws.", _plain("power_watts")),
)


class Metrics:
    """What is counted and kept from one event to the next: steps, and the last word about each worker and link.

    Causes and phases are there from the beginning: a counter that comes to be with its first event does not show as an
    increase. All metrics have the label `run`, which is added when they are shown.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.steps = StepSums()
        self.validation = NamedNumbers()
        # Only of jobs that apply units of work one by one.
        self.placed: BlocksPlaced | None = None
        self.late: Distribution | None = None
        self.gap = 0
        # Bytes by worker of generations that are over; of the one at work there are links.
        self.passed: dict[int, int] = {}
        self.systems: dict[int, SystemSampled] = {}
        self.links: dict[int, LinksMeasured] = {}
        self.dropped: Callable[[], int] = lambda: 0
        self._registry = CollectorRegistry()
        counter: Callable[..., Any] = partial(Counter, registry=self._registry)
        gauge: Callable[..., Any] = partial(Gauge, registry=self._registry)
        histogram: Callable[..., Any] = partial(Histogram, registry=self._registry)
        name = PREFIX.__add__

        self.up = gauge(name("up"), "1 while the job runs, 0 once it has ended.")
        self.job_info = gauge(
            name("job_info"), "What the job is; always 1.", ["name", "task", "lanes", "strategy", "links"]
        )
        self.planned_steps = gauge(name("planned_steps"), "The step with which the job is complete.")

        self.generation = gauge(name("generation"), "Number of the generation that is at work.")
        self.incarnation = gauge(name("coordinator_number"), "Number of the coordinator that has formed it.")
        workers = gauge(name("workers"), "Workers that take part, and how many the job should have.", ["state"])
        self.alive, self.wanted = workers.labels("alive"), workers.labels("wanted")
        self.lost = counter(name("workers_lost_total"), "Workers that were lost, by cause.", ["cause"])
        self.recoveries = counter(
            name("recoveries_total"), "Losses after which the job has completed a new step, by cause.", ["cause"]
        )
        self.recovery_seconds = histogram(
            name("recovery_seconds"),
            "Seconds from the first sign of a loss to the next new step.",
            ["cause"],
            buckets=LONG_BUCKETS,
        )
        for cause in CAUSES:
            for metric in (self.lost, self.recoveries, self.recovery_seconds):
                metric.labels(cause)

        self.checkpoints = counter(name("checkpoints_total"), "Checkpoints that were saved.")
        self.checkpoint_failures = counter(name("checkpoint_failures_total"), "Checkpoints that could not be saved.")
        self.checkpoint_seconds = histogram(
            name("checkpoint_seconds"), "Seconds from the beginning of a save to its commit.", buckets=LONG_BUCKETS
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
            name("checkpoint_failure_timestamp_seconds"), "When one could last not be saved; 0 if all were."
        )
        self.copies = counter(name("checkpoint_copies_total"), "Copies of checkpoints at further places.")
        self.copy_failures = counter(
            name("checkpoint_copy_failures_total"), "Copies that failed; they are tried again."
        )

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that is accepted, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value."""
        of_job = (*self._of_steps(), *self._of_servers(), *self._of_exchange())
        for family in (*self._registry.collect(), *of_job, *self._last_words()):
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = [sample._replace(labels={"run": self.run, **sample.labels}) for sample in samples]
            if samples:
                yield family

    def _of_steps(self) -> Iterator[Metric]:
        steps, last = self.steps, self.steps.last
        yield _gauge("last_step", "The last step that is complete.", steps.position)
        yield _gauge(
            "progress_timestamp_seconds",
            "When the job last got any further: by a step, an evaluation or a checkpoint, or by being started.",
            steps.progressed,
        )
        yield _counter("steps", "Steps that were completed since the launcher was started.", steps.count)
        yield _counter("steps_skipped", "Steps that changed nothing, since a loss was not finite.", steps.skipped)
        overflowed = "Steps that changed no weight, since their gradients were too large for float16."
        yield _counter("steps_overflowed", overflowed, steps.overflowed)
        yield _counter("samples", "Samples that were trained on.", steps.samples)
        yield _counter("bad_samples", "Training samples that were left out as unreadable.", steps.bad)
        waited = "Seconds for which steps waited for the worker that had its data last."
        yield _counter("data_wait_seconds", waited, steps.waited)
        yield _histogram("step_seconds", "Seconds of a step, in the worker that hosts lane 0.", {"": steps.seconds})
        yield _histogram("phase_seconds", "Seconds of a step by phase, in that worker.", steps.by_phase, "phase")
        yield _named("loss", "Training loss of the last step.", steps.losses, "optimizer")
        yield _named("learning_rate", "Learning rate of the last step.", steps.learning_rates, "optimizer")
        yield _named("gradient_norm", "Norm of the gradient of the last step.", steps.gradient_norms, "optimizer")
        yield _named("logged", "What the task has logged in the last step that had it.", steps.logged, "name")
        yield _named("validation_metric", "The last evaluation of the validation set.", self.validation, "metric")
        if last is not None:
            yield _gauge("epoch", "The epoch of the last step, from 0.", last.epoch or 0)
            yield _gauge("samples_per_second", "Samples per second in the last step.", last.samples_per_second or 0.0)
            if last.loss_scale is not None:
                yield _gauge("loss_scale", "What the loss is multiplied by with precision: fp16.", last.loss_scale)

        if self.late is not None:
            text = "Updates of others between the pull and the push of a unit of work."
            yield _histogram("staleness_updates", text, {"": self.late})
            text = "Steps ahead of the oldest unapplied one at which a unit was begun since the last boundary, at most."
            yield _gauge("staleness_gap_steps", text, self.gap)

    def _of_servers(self) -> Iterator[Metric]:
        """Only of jobs that have any."""
        if self.placed is None:
            return
        yield _gauge("servers", "Parameter servers that hold parameters.", len(self.placed.servers))
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
        links, passed, last = dict(self.links), self.bytes_passed(), self.steps.last
        sent = CounterMetricFamily(
            f"{PREFIX}exchange_bytes",
            "Bytes of gradients that went from a worker to others, over links or in shared memory.",
            labels=["worker"],
        )
        for worker, size in passed.items():
            sent.add_metric([str(worker)], size)
        yield sent
        if links and last is not None:
            text = "Bytes of gradients of all workers in the last step, per second that it waited for the exchange."
            size = sum(link.bytes_per_step or 0 for link in links.values())
            yield _gauge("exchange_bytes_per_second", text, size / last.exchange_s if last.exchange_s else 0.0)
        latency = GaugeMetricFamily(
            f"{PREFIX}link_latency_seconds",
            "Seconds of a round trip to the next worker, when the generation began.",
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
        hosts = {said.host: said for said in sorted(systems.values(), key=_spoken) if said.machine is not None}
        yield from _families(OF_MACHINES, [((host,), said.machine) for host, said in hosts.items()])
        gpus = [((str(gpu.index), host), gpu) for host, said in hosts.items() for gpu in said.gpus[:MOST_GPUS]]
        yield from _families(OF_GPUS, list(dict(gpus).items()), "gpu")
        yield _counter("events_dropped", "Events that these metrics have missed, since too many came.", self.dropped())


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


def _spoken(said: SystemSampled) -> float:
    return said.time


def _families(
    readings: Sequence[Reading], said: Sequence[tuple[tuple[str, ...], Any]], *labels: str
) -> Iterator[Metric]:
    for name, text, read in readings:
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[*labels, "host"])
        for values, load in said:
            if (number := read(load)) is not None:
                family.add_metric(list(values), number)
        yield family
