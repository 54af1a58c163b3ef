"""Putting a worker's parts together for one generation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quorate.checkpoint.retention import Retention
from quorate.checkpoint.store import CheckpointFolder
from quorate.checkpoint.tensor_file import Arena
from quorate.core.cached import cached_property
from quorate.core.digests import derive_seed
from quorate.core.errors import OutOfMemory, RunError, TaskError
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Phase, Role
from quorate.core.gpus import VISIBLE, gpus_here, use_gpu, users_of
from quorate.core.user_code import building_code
from quorate.data.collate import collate
from quorate.data.datasets import Dataset, check_dataset, is_stream
from quorate.data.feed import Feed
from quorate.data.indices import Blocked
from quorate.data.sampler import (
    EvaluationPlan,
    LaneSampler,
    MicroBatchChanges,
    Request,
    Sampler,
    Source,
    planned_requests,
)
from quorate.data.samples import Samples
from quorate.data.streams import seed_generators
from quorate.observe.event import Event
from quorate.replica.device import CPU, Device
from quorate.replica.replica import Replica
from quorate.replica.state_layout import StateLayout
from quorate.replica.state_watch import StateWatch
from quorate.spec.device import gpu_of, kind_of
from quorate.spec.job import JobSpec, RingSpec
from quorate.strategies.kinds import Connection, Holdings, StrategyFactory, strategy_factory
from quorate.task.progress import Evaluated, Progress
from quorate.task.run_mode import RunMode
from quorate.task.source import load_dataset
from quorate.task.task import HostedLoop, Task, overrides, sets_of
from quorate.training.activity import Activity, Tracer
from quorate.training.audit import AuditPlan, AuditRecord, LaneAudit
from quorate.training.checkpointer import Checkpointer
from quorate.training.divergence import check_gradients
from quorate.training.lane import Captures, LaneRunner
from quorate.training.loop import Loop
from quorate.training.memory_watch import MemoryWatch
from quorate.training.save import SaveContext
from quorate.training.strategy import Lag, StepRequest, Strategy
from quorate.training.update import Update

TRAINING = RunMode()
NAMES = ("train", "validation", "test")
"""What datasets() gives, in order."""
WITHDRAWN_WITHIN = 5.0
"""Seconds for a save on its way to notice that it is given up."""


@dataclass(frozen=True)
class SessionParts:
    """What a worker builds once and keeps through all generations. `lane_memory` is the descriptor of memory that its
    engine holds for what lanes keep."""

    spec: JobSpec
    task: Task
    replica: Replica
    samples: Samples
    environment: dict[str, str]
    folder: CheckpointFolder
    role: Role = Role.WORKER
    mode: RunMode = TRAINING
    lane_memory: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.task, HostedLoop) and self.mode.is_training:
            self.replica.before_load = partial(self._take_up, self.task)

    def _take_up(self, task: HostedLoop, progress: Progress) -> None:
        _ = self.watch  # of what was built, before `main` changes it
        task.take_up(progress, self.sampler)

    @cached_property
    def updating(self) -> JobSpec:
        """The job as its update sees it: a training loop of one's own may say how gradients are clipped."""
        clip = self.task.clip_norm if isinstance(self.task, HostedLoop) else None
        return self.spec if clip is None else self.spec.model_copy(update={"clip_norm": clip})

    @cached_property
    def sampler(self) -> Sampler:
        """The order of the training samples: to make it anew in every generation would keep a recovery waiting."""
        return sampler_of(self.spec, self.task, self.samples.datasets[Source.TRAINING])

    @cached_property
    def watch(self) -> StateWatch:
        """What the task and the modules keep: as they were built, whatever a generation has done since."""
        return StateWatch(self.task, self.replica)

    @cached_property
    def graphs(self) -> Captures | None:
        """A lane's work as its device has captured it, if it does: another generation replays what this one has
        recorded."""
        capture = self.replica.device.capture
        waits = self.spec.strategy.couples_passes  # for other workers, within a pass
        if capture is None or waits or isinstance(self.task, HostedLoop):
            return None
        from quorate.cuda.captured_program import LaneGraphs

        return LaneGraphs(self.task, self.replica, capture)

    @property
    def are_lanes_audited(self) -> bool:
        """Not in gangs, whose bits are not fixed by lanes, nor with streams: another worker would have to read that of
        the lane from its beginning."""
        is_asked = bool(self.spec.audit.every) and self.mode.is_training
        return is_asked and self.spec.strategy.fixes_bits and not self.samples.is_stream

    @cached_property
    def audits(self) -> AuditRecord:
        """What audits have found, in all generations."""
        return AuditRecord()

    @cached_property
    def memory(self) -> MemoryWatch:
        """What it uses of its device's memory, in all generations."""
        return MemoryWatch(self.spec, self.replica.device)

    @cached_property
    def strategy(self) -> StrategyFactory:
        # What is evaluated or replayed comes to the same without servers.
        spec = self.updating
        if not self.mode.is_training and not isinstance(spec.strategy, RingSpec):
            spec = spec.model_copy(update={"strategy": RingSpec()})
        return strategy_factory(spec, self.replica, Holdings(self.role, self.lane_memory, self.folder))

    @property
    def layout(self) -> StateLayout:
        return self.strategy.layout


@dataclass(frozen=True)
class Hooks:
    """How a worker's loop reaches the world outside.

    `requested` is what the coordinator asks of this worker. Every worker passes through the same steps, which are
    published once, mostly by the worker that hosts lane 0, while the others keep them.
    """

    publish: Callable[[Event], None]
    check_lease: Callable[[], None]
    activity: Activity
    requested: Callable[[], StepRequest] = StepRequest
    save_begun: Callable[[], None] = lambda: None
    keep: Callable[[Event], None] = lambda _: None
    keep_micro_batches: Callable[[MicroBatchChanges], None] = lambda _: None
    tracer: Tracer | None = None
    on_lane: Callable[[Sequence[torch.Tensor]], None] | None = None


def build_samples(task: Task, spec: JobSpec, data: str = "") -> Samples:
    """The task's datasets, checked; `data` names what stands in the place of the validation set, if anything does."""
    seed_generators(derive_seed(spec.seed, "datasets"))
    with building_code("datasets()"):
        given = task.datasets()
    if isinstance(task, HostedLoop):
        task.check(spec)
    elif spec.train_metrics_every is not None and type(task).metrics is Task.metrics:
        raise TaskError(
            f"train_metrics_every: {spec.train_metrics_every} asks for metrics of training batches, and the task has "
            "no metrics() of its own: it has only the loss, which every step reports. Write metrics(), or leave it out."
        )
    pair = sets_of(given)
    if len(pair) not in (1, 2, 3):
        raise TaskError(
            f"datasets() returned {len(pair)} values; return the training set, (training set, validation set), or "
            "(training set, validation set, test set)."
        )
    if is_stream(pair[0]):
        pair[0].bind(spec)
    training = pair[0] if is_stream(pair[0]) else check_dataset(pair[0], "training")
    datasets: dict[Source, Dataset] = {Source.TRAINING: training}
    named = dict(zip(NAMES, pair, strict=False)) | ({data: load_dataset(data)} if ":" in data else {})
    if data and named.get(data) is None:
        given_names = ", ".join(name for name in NAMES if named.get(name) is not None)
        raise TaskError(
            f"datasets() gives no {data} set; it gives {given_names}. Return (training set, validation set, test set), "
            "or name a function that gives a dataset: file.py:function"
        )
    if (validation := named.get(data or "validation")) is not None:
        datasets[Source.VALIDATION] = check_dataset(validation, data or "validation")
    has_own_collate = overrides(task, "collate")
    return Samples(
        datasets,
        task.collate if has_own_collate else collate,
        spec.seed,
        copies=has_own_collate,
        skips=spec.on_bad_sample == "skip",
        # A stream begins a random stream for each of its samples, also for those that are passed over.
        drawing={Source.TRAINING} if is_stream(training) else set(),
    )


def check_evaluable(task: Task, samples: Samples, mode: RunMode) -> None:
    """Refuse an evaluation without anything to evaluate on, and predictions of a task without predict()."""
    is_loop, name = isinstance(task, HostedLoop), type(task).__name__
    instead = "In a script, quorate.open_run(run).load_model() gives the model of a run."
    if mode.evaluates_only and not len(samples.datasets.get(Source.VALIDATION, ())):
        if is_loop:
            say = "call run.evaluate(dataset, measure) before the loop"
            raise TaskError(f"{name}() does not say how to evaluate: {say}. {instead}")
        raise TaskError(
            "datasets() gives no validation set, so there is nothing to evaluate on. "
            "Return (training set, validation set)."
        )
    if mode.predict_to and type(task).predict is Task.predict:
        if is_loop:
            raise TaskError(f"{name}() is a loop of its own, and only a quorate.Task has predict(). {instead}")
        raise TaskError(
            f"{name} has no predict(self, model, batch), which gives what is written of a batch: "
            "a tensor with a row for each sample, or a dict of them by name."
        )


def evaluation_plan(spec: JobSpec, samples: Samples, done: frozenset[int] = frozenset()) -> EvaluationPlan:
    """By default an evaluation batch is as large as what one lane reads of a training batch."""
    size = spec.evaluate.batch_size or -(-spec.batch_size // spec.lanes)
    validation = samples.datasets.get(Source.VALIDATION, ())
    in_step = spec.strategy.mesh(1) is not None
    return EvaluationPlan(len(validation), size, spec.lanes, spec.evaluate.every, in_step, done)


def sampler_of(spec: JobSpec, task: Task, training: Dataset) -> Sampler:
    """The order of the training set: in blocks where it has any, unless the task has an order of its own."""
    has_own_order = overrides(task, "order")
    if is_stream(training):
        if has_own_order:
            raise TaskError("order() chooses samples by their number, and a quorate.Stream has none: leave one out.")
        from quorate.data.stream import StreamSampler

        return StreamSampler(spec, len(training))
    if isinstance(training, Blocked) and not has_own_order:
        from quorate.data.block_sampler import BlockSampler

        return BlockSampler.of(spec, training, len(training))
    with building_code("order()"):
        return LaneSampler(spec, len(training), task.order)


@dataclass(frozen=True)
class Assembly:
    """One worker's parts in one generation; `loop` puts them together."""

    parts: SessionParts
    generation: Generation
    worker: int
    connection: Connection
    progress: Progress
    checkpointer: Checkpointer
    hooks: Hooks

    @property
    def own(self) -> Member:
        return self.generation.members[self.generation.position(self.worker)]

    def loop(self) -> Loop:
        parts, connection, hooks, mode = self.parts, self.connection, self.hooks, self.parts.mode
        spec, task, replica, watch = parts.spec, parts.task, parts.replica, parts.watch
        predicted = frozenset[int]()
        if mode.predict_to:
            from quorate.training.evaluation import predicted_in

            predicted = predicted_in(Path(mode.predict_to))
        evaluation = evaluation_plan(spec, parts.samples, predicted)
        audit, update = self._audit(), self._update()
        update.audit = audit
        strategy = connection.strategy(update, hooks.activity)
        kind: type[Loop] = getattr(connection, "loop", Loop)
        make: Callable[..., Loop] = kind
        lag: Lag | None = getattr(strategy, "lag", None)
        ended: Callable[[int], None] | None = None
        if isinstance(task, HostedLoop) and strategy.hosted:
            from quorate.own_loop.loop import OwnLoop  # with greenlets
            from quorate.own_loop.rehearsal import TurnsLoop

            assert isinstance(task, OwnLoop)
            make, ended = partial(TurnsLoop, main=task), task.end_lane
        elif lag is not None:
            from quorate.training.late_loop import LateLoop  # on a device

            make = partial(LateLoop, lag=lag)
        on_lane = hooks.on_lane if spec.strategy.fixes_bits else None
        feed = self._feed(strategy.hosted, evaluation, audit)
        return make(
            spec=spec,
            sampler=parts.sampler,
            evaluation=evaluation,
            replica=replica,
            feed=feed,
            watch=watch,
            lanes=LaneRunner(task, replica, connection.gradients, watch, spec.seed, parts.graphs, ended, on_lane),
            strategy=strategy,
            update=update,
            evaluate=partial(self._evaluate, evaluation, feed),
            checkpointer=self.checkpointer,
            activity=hooks.activity,
            progress=self.progress,
            memory=parts.memory,
            publish=hooks.publish if kind.publishes(strategy, self.own.lanes) else hooks.keep,
            check_lease=hooks.check_lease,
            requested=hooks.requested,
            save_begun=hooks.save_begun,
            keep_micro_batches=hooks.keep_micro_batches,
            workers=len(self.generation.members),
            tracer=hooks.tracer,
            mode=mode,
            audit=audit,
        )

    def _evaluate(self, plan: EvaluationPlan, feed: Feed, step: int, strategy: Strategy) -> Evaluated:
        from quorate.training.evaluation import Evaluator  # many jobs have none

        parts, advance, folder = self.parts, self.hooks.activity.advance, self.parts.mode.predict_to
        averaged = parts.mode.evaluates_averages(parts.spec.average)
        rest = parts.task, parts.replica, plan, feed, parts.watch, parts.spec.seed, advance, averaged
        if not folder:
            return Evaluator(*rest).run(step, strategy)
        from quorate.training.evaluation import Predictor

        return Predictor(*rest, folder=Path(folder)).run(step, strategy)

    def _update(self) -> Update:
        parts, replica, activity = self.parts, self.parts.replica, self.hooks.activity
        gradients, links = self.connection.gradients, self.connection.links
        update = Update(
            parts.updating,
            replica,
            gradients,
            parts.watch,
            parts.sampler,
            activity,
            settle=self.checkpointer.settle_before,
            check_lease=self.hooks.check_lease,
        )
        if (check := parts.spec.check_gradients) is not None and len(self.generation.workers) > 1:
            rest = self.worker, replica.trainable, replica.device, links.gather, activity
            update.check_gradients = partial(check_gradients, check.every, *rest)
        return update

    def _feed(self, hosted: range, evaluation: EvaluationPlan, audit: LaneAudit | None) -> Feed:
        parts, progress, spec, sampler = self.parts, self.progress, self.parts.spec, self.parts.sampler
        audited = (lambda _: ()) if audit is None else audit.lanes
        requests: Iterator[Request] = planned_requests(
            sampler, evaluation, hosted, progress.cursor, progress.micro_batches, audited
        )
        if parts.mode.evaluates_only:
            requests = (evaluation.request(batch) for batch in evaluation.hosted_batches(hosted))
        return Feed(
            parts.samples,
            requests,
            spec.loader_workers,
            spec.threads,
            spec.loader_prefetch,
            # That read at all: the batches of a very small set leave some without a sample.
            lanes=max(1, sum(lane < sampler.batch_samples(1) for lane in hosted)),
            check=self.hooks.check_lease,
            is_planned=spec.strategy.is_synchronous and not parts.mode.batch_for,
            room=parts.replica.device.room,
        )

    def _audit(self) -> LaneAudit | None:
        parts, generation, record, step = self.parts, self.generation, self.parts.audits, self.progress.cursor.step
        if not parts.are_lanes_audited:
            return None
        if self.worker not in record.clean:
            # Where there are others, the first step tells how far they were found right.
            record.clean[self.worker], record.floor = step, step if len(generation.workers) == 1 else None

        def withdraw(after: int) -> None:
            self.checkpointer.go_back(Cursor(after, Phase.EVALUATED))
            self.checkpointer.close(WITHDRAWN_WITHIN)
            parts.folder.set_aside(after)

        hosts = [(member.worker, member.lanes) for member in generation.workers]
        plan = AuditPlan(parts.spec.audit.every, hosts, step + 1)
        return LaneAudit(plan, self.own, generation.members, record, self.connection.links.gather, withdraw)


def checkpointer_of(
    parts: SessionParts,
    *,
    publish: Callable[[Event], None],
    check_lease: Callable[[], None],
    check_commit: Callable[[], None],
    flush_events: Callable[[], None] = lambda: None,
    activity: Activity | None = None,
    tracer: Tracer | None = None,
    generation: Callable[[], GenerationId | None] = lambda: None,
    restored: Cursor | None = None,
) -> Checkpointer:
    """What saves a worker's state through all generations. It publishes from a thread of its own."""
    rules = parts.spec.checkpoint
    retention = Retention(rules.keep, rules.keep_every) if parts.mode.is_training else None
    return Checkpointer(
        SaveContext(
            parts.folder,
            retention,
            publish,
            check_commit,
            flush_events,
            generation,
            arena=Arena(parts.replica.device.lock_pages),
            audited=(lambda: parts.audits.floor) if parts.are_lanes_audited else None,
        ),
        parts.layout,
        rules,
        parts.spec.model_dump(mode="json"),
        parts.environment,
        check_lease=check_lease,
        activity=activity or Activity(lambda *_: None),
        tracer=tracer,
        restored=restored,
    )


def device_for(spec: JobSpec, member: int, compile_cache: Path | None = None) -> Device:
    """The device of a worker or a server. Of several GPUs each gets one, in turn, and sees no other."""
    if kind_of(spec) == "cpu":
        return CPU if spec.precision in ("auto", "fp32") else Device(spec.precision)
    gpus = gpus_here()
    if not gpus:
        raise RunError("`device: cuda` asks for a GPU, and this machine has none. Use `device: cpu`, or `auto`.")
    gpu = gpus[gpu_of(member, len(gpus))]
    use_gpu(gpu)
    # Imported only here: a job on the CPU never needs it.
    from quorate.cuda.device import CudaDevice, can_compile

    is_sharded = spec.strategy.mesh(1) is not None  # gathers its weights on the way, which is not compiled
    compiles = not is_sharded and (can_compile() if spec.compile == "auto" else spec.compile)
    captures = spec.capture and not is_sharded
    device = CudaDevice(spec.precision, compiles=compiles, captures=captures, cache=compile_cache)
    check_room(device, gpu)
    return device


def check_room(device: Device, gpu: str) -> None:
    """Refuse a GPU that has no room for anything. It may have later: whoever was killed there takes a while to go."""
    try:
        device.zeros(1, torch.float32)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        users = users_of(gpu) or "who uses it, nvidia-smi does not say here"
        raise OutOfMemory(f"GPU {gpu} is full: {users}. Another can be chosen with {VISIBLE}.") from None
