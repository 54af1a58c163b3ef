"""`quorate plan`: what a job needs, before anything is trained: parameters, memory, communication, and what fits."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from quorate.api.tasks import TaskLocation
from quorate.core.errors import RequestError
from quorate.core.gpus import gpus_here, memory_of
from quorate.core.machine import free_memory, usable_cores
from quorate.data.sampler import Request, Source
from quorate.data.samples import Samples, batch_of
from quorate.lanes.buckets import plan_buckets
from quorate.lanes.chunks import host_lanes
from quorate.observe.quantities import plural, size
from quorate.replica.footprint import (
    Footprint,
    ModuleSize,
    Part,
    Spread,
    SpreadPlan,
    Traffic,
    footprint,
    ring_traffic,
)
from quorate.spec.device import kind_of, workers_here
from quorate.spec.job import JobSpec
from quorate.spec.keys import AUTO_BATCH
from quorate.spec.resolved import ResolvedJob
from quorate.task.task import HostedLoop, Task, configure
from quorate.worker.assembly import build_samples

SPARE = 0.1
"""Of a device's memory: what its driver takes, and what lies idle between tensors."""
FIRST_GUESS = 2
"""Samples at a time, where `batch_size: auto` has not been found yet."""


@dataclass(frozen=True)
class Target:
    """Where it is to fit: the memory of a device, and how many workers have it between them."""

    memory: int
    workers: int
    what: str

    @property
    def room(self) -> int:
        """Bytes for each worker."""
        return int(self.memory * (1 - SPARE)) // self.workers


@dataclass(frozen=True)
class Sizes:
    """The model: how many parameters, their bytes by type, and its parts, largest first."""

    parameters: int
    trained: int
    bytes: int
    by_dtype: dict[str, int]
    modules: tuple[ModuleSize, ...]


@dataclass(frozen=True)
class Plan:
    """All that is told. `samples` go through the model at a time; `most_samples` would fit. `spread` is how
    `strategy: fsdp` cuts the model."""

    job: str
    device: str
    precision: str
    compiled: bool
    checkpointed: bool | str
    lanes: int
    workers: int
    accumulate: int
    samples: int
    model: Sizes
    parts: tuple[Part, ...]
    target: Target
    traffic: tuple[Traffic, ...]
    server: Traffic | None
    spread: Spread | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.target.room

    @property
    def most_samples(self) -> int:
        fixed = sum(part.bytes for part in self.parts if not part.grows)
        growing = sum(part.bytes for part in self.parts if part.grows)
        return max(0, (self.target.room - fixed) * self.samples // max(1, growing))


def parse_memory(text: str) -> int:
    """Bytes, as a person writes them: 80GB, 80 GiB, 512M."""
    with suppress(ValidationError):
        whole = text.strip() + ("B" if text.strip().endswith("i") else "")  # as Kubernetes writes them: 80Gi
        if amount := int(TypeAdapter(ByteSize).validate_python(whole)):
            return amount
    raise RequestError(f"--memory: {text!r} is not an amount of memory. Write for example 80GB or 141GiB.")


def plan_job(resolved: ResolvedJob, memory: int | None = None) -> Plan:
    """Plan for devices of so much memory, or for this machine."""
    spec = resolved.spec
    # Whoever names a size of memory means GPUs: this machine need not have any.
    is_gpu = spec.device == "auto" and memory is not None
    device = "cuda" if is_gpu else kind_of(spec)
    with TaskLocation(spec.task).loaded(spec.seed) as task_type:
        task = configure(task_type, spec.params, resolved.source, spec.seed, spec)
        if isinstance(task, HostedLoop):
            raise RequestError(
                f"task: {task_type.__name__}() has a training loop of its own, and what it computes is not known "
                "before it runs. `quorate plan` takes a quorate.Task."
            )
        planning = _Planning(spec, task, device)
        return planning.plan(_target(spec, device, memory, planning.workers))


class _Planning:
    """A job on a kind of device, of which parts are traced when they are needed."""

    def __init__(self, spec: JobSpec, task: Task, device: str) -> None:
        self.spec, self.device = spec, device
        self.precision = spec.precision
        if self.precision == "auto":
            self.precision = "bf16" if device == "cuda" else "fp32"
        self.workers = workers_here(spec, usable_cores())
        shape = spec.strategy.mesh(self.workers)
        # A model that is gathered on the way is not compiled.
        self.compiled = device == "cuda" and spec.compile is not False and shape is None
        if shape is None:
            self.workers = min(spec.lanes, self.workers)
            self.hosting = host_lanes(spec.lanes, self.workers)
        else:
            self.hosting = tuple(shape.lanes_of(worker, spec.lanes) for worker in range(shape.size))
        parts = spec.lanes * spec.accumulate
        self.samples = FIRST_GUESS if spec.batch_size == AUTO_BATCH else -(-spec.batch_size // parts)
        self._task = task
        self._samples: Samples = build_samples(task, spec)
        self._sharded: SpreadPlan | None = None
        if shape is not None:
            self._sharded = resolve_name(spec.strategy.planning)(task, spec, shape)

    def plan(self, target: Target) -> Plan:
        spec, checkpointed = self.spec, self.spec.memory.checkpoint_activations
        found = self._traced(checkpointed)
        parts = tuple(self._parts(found))
        traffic, server = self._traffic(found)
        plan = Plan(
            job=spec.name,
            device=self.device,
            precision=self.precision,
            compiled=self.compiled,
            checkpointed=checkpointed,
            lanes=spec.lanes,
            workers=self.workers,
            accumulate=spec.accumulate,
            samples=self.samples,
            model=_sizes(found if self._sharded is None else self._sharded.whole(found)),
            parts=parts,
            target=target,
            traffic=traffic,
            server=server,
            spread=None if self._sharded is None else self._sharded.spread,
            advice=(),
            notes=(*found.notes, *self._notes()),
        )
        if plan.fits:
            return plan
        again = self._traced(True) if found.has_blocks and not checkpointed else None
        return replace(plan, advice=tuple(self._advice(plan, found, again)))

    def _traced(self, checkpointed: bool | str) -> Footprint:
        """With the model as it is on a worker."""
        if self._sharded is None:
            return self._trace(checkpointed, None)
        return self._sharded.traced(lambda cut: self._trace(checkpointed, cut))

    def _trace(self, checkpointed: bool | str, cut: Callable[[Any], None] | None) -> Footprint:
        return footprint(
            self._task,
            self.spec,
            self._batch(self.samples),
            self.samples,
            precision=self.precision,
            checkpointed=checkpointed,
            cut=cut,
        )

    def _batch(self, samples: int) -> Any:
        length = len(self._samples.datasets[Source.TRAINING])
        numbers = [number % length for number in range(samples)]
        return batch_of(self._samples[Request(Source.TRAINING, 0, numbers)]).content

    def _parts(self, found: Footprint) -> Iterator[Part]:
        if self._sharded is not None:
            yield from self._sharded.parts(found, self.precision)
            return
        spec, hosted = self.spec, len(self.hosting[0])
        yield Part("weights", found.weights)
        if found.buffers:
            yield Part("buffers", found.buffers)
        if spec.lanes == 1:
            yield Part("gradients", found.gradients)
        else:
            yield Part("gradients", (hosted + 1) * found.gradients, f"{plural(hosted, 'lane')} of its own, and the sum")
        if spec.strategy.server_count:
            yield Part("optimizer", 0, f"on the servers: {size(found.optimizer)}")
        else:
            yield Part("optimizer", found.optimizer)
        if spec.average is not None:
            yield Part("averages", found.weights)
        if spec.strategy.keeps_residuals:
            yield Part("feedback", hosted * found.gradients, "what compression has left out so far")
        if found.weight_copies:
            yield Part("weight copies", found.weight_copies, f"in {self.precision}")
        yield Part("activations", found.kept, "kept for the backward pass", grows=True)
        if found.working:
            yield Part("working", found.working, "at the worst moment of a step", grows=True)
        yield Part("batch", found.batch, grows=True)

    def _traffic(self, found: Footprint) -> tuple[tuple[Traffic, ...], Traffic | None]:
        strategy = self.spec.strategy
        if self._sharded is not None:
            return self._sharded.traffic(found), None
        if strategy.server_count:
            workers, server = strategy.server_traffic(found.gradients, self.hosting)
            return tuple(Traffic(*each) for each in workers), Traffic(*server)
        sizes = {shape.dtype: shape.itemsize for shape in found.trained}
        buckets = plan_buckets(found.trained, self.spec.bucket_mb)
        return ring_traffic([(bucket.numel, sizes[bucket.dtype]) for bucket in buckets], self.hosting), None

    def _notes(self) -> Iterator[str]:
        if self.spec.batch_size == AUTO_BATCH:
            yield f"batch_size: auto is found when a job begins; this is for {FIRST_GUESS} samples at a time"
        if self.compiled:
            yield "kernels that are compiled reuse memory, and need less than this"
        if self.spec.strategy.treatments:
            yield "communication is given without strategy.compress, which makes it less"

    def _advice(self, plan: Plan, found: Footprint, again: Footprint | None) -> Iterator[str]:
        """What would make it fit, in the order of what it costs; what does not suffice alone says so."""
        room, each = plan.target.room, self.spec.lanes * self.spec.accumulate
        fixed = sum(part.bytes for part in plan.parts if not part.grows)
        most = plan.most_samples
        if fixed > room:
            yield (
                f"Weights, gradients and optimizer alone take {size(fixed)}, and there is room for {size(room)}: no "
                "batch is small enough."
            )
        if most:
            times = -(-plan.samples // most)
            accumulate = self.spec.accumulate * times
            yield (
                f"accumulate: {accumulate} has {-(-plan.samples // times)} samples go through the model at a time "
                f"instead of {plan.samples}; the batch stays what it is."
            )
        if again is not None:
            need = sum(part.bytes for part in self._parts(again))
            less = f"memory: {{checkpoint_activations: true}} needs {size(need)} instead of {size(plan.bytes)}"
            yield f"{less}, which {'fits' if need <= room else 'is not enough alone'}; steps take about a third longer."
        if plan.precision == "fp32" and plan.device == "cuda":
            yield "precision: bf16 halves most of the activations."
        if self._sharded is not None:
            yield from self._sharded.advice(found, plan.precision, room)
        elif len(self.hosting[0]) > 1:
            yield (
                f"More workers: each lane that a worker hosts takes {size(found.gradients)} for its gradient, and of "
                f"{plan.lanes} lanes one of {plural(plan.workers, 'worker')} hosts {len(self.hosting[0])}. "
                f"With {plan.lanes} workers, each on a device of its own, each hosts one."
            )
        if most:
            yield f"batch_size: {most * each} is the largest that fits otherwise as it is; it changes what is learned."
        if not most and self._sharded is None:
            yield (
                "strategy: fsdp gives each worker a part of weights, gradients and optimizer: "
                "`quorate plan JOB --workers 4 --set strategy=fsdp` says what each then needs."
            )


def _sizes(found: Footprint) -> Sizes:
    by_dtype: dict[str, int] = {}
    for shape in found.tensors:
        name = shape.dtype.removeprefix("torch.")
        by_dtype[name] = by_dtype.get(name, 0) + shape.nbytes
    trained = sum(shape.numel for shape in found.trained)
    return Sizes(sum(shape.numel for shape in found.tensors), trained, found.weights, by_dtype, found.modules)


def _target(spec: JobSpec, device: str, memory: int | None, workers: int) -> Target:
    if memory is not None:
        return Target(memory, 1, "a GPU" if device == "cuda" else "a worker's share of the host")
    if device == "cpu":
        return Target(free_memory(), workers, "the memory that is free here")
    gpus = gpus_here()
    there = memory_of(gpus[0]) if gpus else None
    if there is None:
        raise RequestError("how much memory a GPU has is not known here: give it with --memory, such as --memory 80GB.")
    return Target(there, -(-(workers + spec.strategy.server_count) // len(gpus)), "the GPU here")
