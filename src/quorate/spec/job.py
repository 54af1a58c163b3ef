"""The keys of a job file: what each takes, its default, and whether it changes the bits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)

from quorate.core.masking import secrets_in, url_secrets
from quorate.spec.keys import (
    AUTO,
    AUTO_BATCH,
    FOLDER,
    VERSION,
    Allowed,
    Count,
    CountOrZero,
    Mark,
    OptionalCount,
    OptionalPositive,
    Positive,
    Section,
    keys_of,
    spelled_out,
)
from quorate.spec.options import EngineSection, LocalSpec, Sealing, StrategySection, open_to_options
from quorate.spec.tracking import NotifySpec, TrackSpec

OWN_PLACE = "checkpoints"
"""How `checkpoint.to` names the folder of that name in the run folder."""
USUAL_MINUTES = 10
"""Between two saves of a job that does not say when to save."""
MetricName = Annotated[str, Field(min_length=1), Allowed("the name of a metric")]


def _placed_reference(text: str, info: ValidationInfo) -> str:
    reference = TaskReference.parse(text)
    return str(reference.within(info.context[FOLDER]) if info.context else reference)


def version_check(present: int) -> Callable[[Any], Any]:
    """Checks the version of a file, and raises ValueError that says what to do about another one."""

    def checked(value: Any) -> Any:
        # Literal[1] alone takes true and 1.0 as well: Python holds them for equal.
        if type(value) is not int or value < present:
            raise ValueError(f"Write version: {present}.")
        if value > present:
            raise ValueError("It was written for a newer Quorate; `quorate --version` shows yours.")
        return value

    return checked


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        below = 1 << value.bit_length() - 1
        raise ValueError(f"Multiplying by it must not round: write {below} or {2 * below}.")
    return value


class ScheduleSpec(Section):
    """How the learning rate changes: it rises during `warmup` steps, then stays constant or falls to `final` times the
    base rate.

    `per` says whether this schedule, or the task's own scheduler, counts steps (the default) or epochs.
    """

    kind: Annotated[
        Literal["constant", "linear", "cosine", "range"] | None,
        Allowed("constant, linear or cosine"),
    ] = None
    """The shape after the warmup. Leave it out to set only `per` for the task's own scheduler."""
    # `range` is that of find-lr: the rate rises exponentially, and the task's own scheduler is left out.
    warmup: CountOrZero = 0
    """Steps (or epochs) during which the rate rises from near 0."""
    final: Annotated[float, Field(ge=0, le=1), Allowed("a fraction from 0 to 1")] = 0.0
    """The rate at the end, as a fraction of the base rate."""
    per: Literal["step", "epoch"] | None = None
    """Whether the schedule counts steps or epochs."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the rate of a step would be another if the job were longer."""
        return self.kind not in (None, "constant")


class EvaluateSpec(Section):
    """When to evaluate, and which metric decides whether a model is the best so far."""

    every: Annotated[
        Annotated[int, Field(ge=1)] | Literal["epoch", "end"],
        Allowed("a whole number of steps of at least 1, epoch or end"),
    ] = "epoch"
    """Every N steps, after every epoch, or at the end only."""
    batch_size: OptionalCount = None
    """Samples per evaluation batch; null: `batch_size` of the job."""
    metric: MetricName | None = None
    """The metric that decides which model is the best so far; null: no model is."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of `metric` is better."""


class EarlyStopSpec(Section):
    """Stop after `patience` evaluations without a better `metric`."""

    metric: MetricName
    """The metric to watch."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value is better."""
    patience: Count
    """Evaluations without a better value after which training stops."""


class AverageSpec(Section):
    """The decay of the average, and whether the job evaluates the averaged weights."""

    decay: Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
    """The part of the average that is kept at each step, such as 0.999."""
    evaluate: bool = False
    """Evaluate the averaged weights instead of the trained ones."""


class MemorySpec(Section):
    """Activation checkpointing: save memory by computing some modules again in the backward pass."""

    checkpoint_activations: Annotated[
        bool | Annotated[str, Field(min_length=1)],
        Allowed('true (the blocks that the model repeats), false, or a pattern of module names, such as "blocks.*"'),
    ] = False
    """Keep only the inputs of these modules, and compute them again in the backward pass."""


class LossScaleSpec(Section):
    """The first loss scale, and when it grows."""

    initial: Annotated[
        int, Field(ge=1, le=2**40), AfterValidator(_power_of_two), Allowed("a power of two, such as 65536")
    ] = 2**16
    """The first loss scale."""
    growth_interval: Count = 2000
    """Steps in a row without overflow after which the loss scale doubles."""


@open_to_options("checkpoint")
class CheckpointSpec(Section):
    """When to save, which checkpoints to keep, where copies go, and how they are written.

    Checkpoints are saved every N steps or after every epoch, every N minutes, or both; also after each evaluation that
    is the best so far, and at the end of the job.
    """

    every: Annotated[
        Annotated[int, Field(ge=1)] | Literal["epoch"] | None,
        Allowed("a whole number of steps of at least 1, epoch, or null"),
    ] = None
    """Save every N steps, or after every epoch."""
    minutes: Annotated[
        float | None,
        Field(ge=0),
        Allowed(f"a number of minutes, 0 (never by the clock), or null ({USUAL_MINUTES} if `every` is not given)"),
    ] = None
    """Save every N minutes."""
    keep: Count = 3
    """How many of the newest checkpoints to keep. The best one is kept, too."""
    keep_every: OptionalCount = None
    """Never remove a checkpoint whose step is a multiple of this."""
    to: Annotated[
        list[str], Allowed("a list of places, such as [checkpoints, /mnt/backup] or [checkpoints, s3://bucket/prefix]")
    ] = [OWN_PLACE]
    """Where checkpoints are stored: first the run's own folder, then folders (which must exist) and URLs for copies."""
    source: bool = True
    """Store the task's source with the copies, unencrypted. Has no effect if `encrypt` is set."""
    when_busy: Literal["wait", "skip"] = "wait"
    """If a save is due while another is still being written: wait for that one, or skip this save. A new best always
    waits."""
    digest: Literal["xxh3-128", "sha-256"] = "xxh3-128"
    """The digest by which checkpoints are verified."""

    @property
    def sealing(self) -> Sealing | None:
        """How checkpoints are encrypted; None if they are not."""
        given = (getattr(self, key) for key in type(self).model_fields)
        return next((each for each in given if isinstance(each, Sealing)), None)

    @property
    def minutes_between(self) -> float | None:
        """How many minutes after a save the next one is due; none if the clock does not count."""
        if self.minutes is None:
            # A job that says nothing must not lose hours when all its workers die.
            return USUAL_MINUTES if self.every is None else None
        return self.minutes or None


class CheckGradientsSpec(Section):
    """How often workers compare their gradients."""

    every: Count
    """Compare gradients in every N-th step."""


class AuditSpec(Section):
    """How often a lane is computed a second time."""

    every: CountOrZero = 200
    """Audit one lane in N; 0: none."""


class LineageSpec(Section):
    """The values of `params` and other keys that the job is trained with until a step."""

    until: Count
    """The step until which these values apply."""
    params: Annotated[dict[str, Any], Allowed("a mapping of the task's own parameters")] = {}
    """All of the task's parameters until then."""
    clip_norm: OptionalPositive = None
    """`clip_norm` until then. Left out: that of the job."""
    schedule: ScheduleSpec | None = None
    """`schedule` until then. Left out: that of the job."""

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Null is another value than that of the job, which is what is left out here.
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


CHANGEABLE = tuple(key for key in LineageSpec.model_fields if key != "until")
"""The keys that may change while a model is trained: it stays of the same shape, and its data in the same order."""


@open_to_options("strategy.ring")
class RingSpec(StrategySection):
    """Gradients are summed around a ring of workers, in an order that does not depend on their number."""

    kind: Literal["ring"] = "ring"
    factory: ClassVar[str] = "quorate.strategies.ring:RingFactory"


@open_to_options("job", strategy=(RingSpec,), engine=(LocalSpec,))
class JobSpec(Section):
    """A whole job. Each key is marked by whether it affects results (the bits)."""

    version: Annotated[
        Literal[2],
        Mark.LABEL,
        BeforeValidator(version_check(VERSION)),
        Allowed("1 or 2, the versions of the job file that this Quorate reads"),
    ] = VERSION
    """The version of the job file."""
    name: Annotated[
        str,
        Mark.LABEL,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
        Allowed("a name of letters, digits, dots, dashes and underscores (at most 100), the first a letter or digit"),
    ] = "job"
    """The name of the job: its runs are `name-0001`, `name-0002`, …. By default the name of the file."""
    task: Annotated[
        str, Mark.MEANING, AfterValidator(_placed_reference), Allowed("file.py:Class or package.module:Class")
    ]
    """The task's class, or a function with a training loop of its own. A file is relative to the job file."""
    params: Annotated[dict[str, Any], Mark.MEANING, Allowed("a mapping of the task's own parameters")] = {}
    """The task's own parameters: its class attributes with a type, or the arguments of the function."""
    # The order of their sums is laid out lane by lane: it takes a time that grows with their square.
    lanes: Annotated[int, Mark.MEANING, Field(ge=1, le=4096), Allowed("a whole number from 1 to 4096")] = 8
    """Slices of every batch. Each lane has its own gradient, and a worker computes one or more lanes."""
    threads: Annotated[Count, Mark.MEANING] = 1
    """Threads per lane."""
    batch_size: Annotated[
        int,
        Mark.MEANING,
        Field(ge=1),
        BeforeValidator(lambda value: AUTO_BATCH if value == AUTO else value),
        PlainSerializer(lambda value: AUTO if value == AUTO_BATCH else value),
        Allowed("a whole number of at least 1, or auto"),
    ]
    """Samples of one update, of all lanes and micro-batches together: a lane has `batch_size / lanes` of them, and
    `accumulate` cuts these into smaller parts. It is what is elsewhere a product: in Hugging Face's `Trainer`
    `per_device_train_batch_size` × `gradient_accumulation_steps` × devices, in Lightning the loader's `batch_size` ×
    `accumulate_grad_batches` × devices. `auto` finds the largest that fits into memory before the run begins, and
    writes it into the run's job."""
    epochs: Annotated[OptionalCount, Mark.MEANING] = None
    """How many epochs to train. Give this or `steps`."""
    steps: Annotated[OptionalCount, Mark.MEANING] = None
    """How many steps to train. Give this or `epochs`."""
    seed: Annotated[
        int, Mark.MEANING, Field(ge=0, lt=2**63), Allowed("a whole number of at least 0 and below 2**63")
    ] = 0
    """The seed of all random streams."""
    accumulate: Annotated[Count, Mark.MEANING] = 1
    """Micro-batches per lane and step: into so many parts a lane's share of `batch_size` is cut. More of them need less
    memory; the batch stays as large as it is."""
    clip_norm: Annotated[OptionalPositive, Mark.MEANING] = None
    """Scale gradients with a larger norm down to this norm; null: do not clip."""
    schedule: Annotated[ScheduleSpec | None, Mark.MEANING] = None
    average: Annotated[AverageSpec | None, Mark.MEANING] = None
    """Keep an exponential moving average of the weights besides the trained weights. `quorate eval`, `checkpoints
    export` and `load_model()` use those that the job evaluates; `--averaged` and `--trained` (in Python `averaged`)
    choose."""
    last_batch: Annotated[Literal["drop", "keep"], Mark.MEANING] = "drop"
    """Drop or keep the samples at the end of an epoch that do not fill a batch."""
    evaluate: Annotated[EvaluateSpec, Mark.MEANING] = EvaluateSpec()
    early_stop: Annotated[EarlyStopSpec | None, Mark.MEANING] = None
    lineage: Annotated[
        list[LineageSpec],
        Mark.MEANING,
        Allowed("a list of what the job was before, such as [{until: 100, params: {learning_rate: 0.1}}]"),
    ] = []
    """Earlier values of some keys: the job is trained with them until a step, and from there with its own values.
    Written by `resume --branch` and population-based training, so that such a run can be trained again."""
    on_nonfinite_loss: Annotated[Literal["fail", "skip"], Mark.MEANING] = "fail"
    """If the loss of a step is not finite: `fail` ends the job, `skip` skips the update and reports the samples."""
    on_out_of_memory: Annotated[Literal["fail", "shrink"], Mark.MEANING] = "fail"
    """If a lane runs out of memory: `fail` ends the job and says what to change, `shrink` repeats the step in all
    workers with twice as many micro-batches of the same batch, and continues with them."""
    on_bad_sample: Annotated[Literal["fail", "skip"], Mark.MEANING] = "fail"
    """If a record of `quorate.Shards` is damaged, or `decode` raises an exception for it: `fail` ends the job and names
    the file, `skip` leaves the sample out of its batch and reports it."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Mark.MEANING] = "auto"
    """Where to train. `auto` uses a GPU if there is one that the strategy can use: with `strategy.compress` of `ring`
    and `parameter-server`, and in asynchronous training, only CPUs are used."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Mark.MEANING] = "auto"
    """The precision of the forward and backward pass. `auto` is bf16 on a GPU that supports it, otherwise fp32.
    Parameters stay in float32."""
    loss_scale: Annotated[LossScaleSpec, Mark.MEANING] = LossScaleSpec()
    """The factor by which the loss is multiplied with `precision: fp16`. It is halved when gradients overflow."""
    compile: Annotated[bool | Literal["auto"], Mark.MEANING, Allowed("auto, true or false")] = "auto"
    """On a GPU, compile `loss()` with `torch.compile`. `auto` trains without it if that fails, and says why."""
    memory: Annotated[MemorySpec, Mark.MEANING] = MemorySpec()
    deterministic: Annotated[bool, Mark.MEANING] = True
    """Use only deterministic kernels, which give the same bits each time."""
    bucket_mb: Annotated[Positive, Mark.MEANING] = 25.0
    """Gradients are exchanged in buckets of this size, in MiB."""
    strategy: Annotated[StrategySection, Mark.MEANING, BeforeValidator(spelled_out)] = RingSpec()
    """How the gradients of the lanes become an update."""

    workers: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Mark.MANNER,
        Allowed("a whole number of at least 1, or auto"),
    ] = "auto"
    """How many processes train, at most one for each lane. `auto` is min(lanes, cores ÷ threads), within the CPU
    affinity and quota of the container; on GPUs min(lanes, GPUs); with `engine: ray` one for each lane, started as soon
    as there is room for it."""
    min_workers: Annotated[Count, Mark.MANNER] = 1
    """With fewer workers than this, training waits until lost ones are replaced."""
    spares: Annotated[CountOrZero, Mark.MANNER] = 0
    """Workers in reserve, whose model is built already, so that they replace a lost one at once."""
    engine: Annotated[EngineSection, Mark.MANNER, BeforeValidator(spelled_out)] = LocalSpec()
    """Where processes run. A kind alone is enough: `engine: ray`."""
    failure_timeout: Annotated[float, Mark.MANNER, Field(gt=0), Allowed("a number of seconds above 0")] = 5.0
    """Seconds without a heartbeat after which a worker counts as lost."""
    step_timeout: Annotated[OptionalPositive, Mark.MANNER] = None
    """Seconds without any progress (a lane, an evaluation batch, a piece of a copy or save) after which the worker that
    holds up the others counts as lost. Null: 30 minutes, or 100 times the longest time so far if that is more. A stall
    is reported much earlier."""
    setup_timeout: Annotated[OptionalPositive, Mark.MANNER] = None
    """Seconds that a worker may take from its start until it can train: importing the task, `model()`, `datasets()`,
    loading a checkpoint. Null: no limit."""
    balance: Annotated[Literal["even", "speed"], Mark.MANNER] = "even"
    """How lanes are distributed among workers. `speed` gives fewer lanes to slow workers, and moves lanes if that
    shortens a step by at least a fifth."""
    runs: Annotated[str, Mark.MANNER, Field(min_length=1), Allowed("the path of a folder, as text")] = "runs"
    """The folder of run folders. In a job file it is relative to that file; from `--runs`, `QUORATE_RUNS` and Python,
    to the current folder. A job file that names none uses the nearest `runs` beside it or above that has runs already;
    the first run makes `runs` in the current folder if the job file is there or below, otherwise beside the job file.
    """
    share: Annotated[Literal["group"] | None, Mark.MANNER, Allowed("group or null")] = None
    """Who else may look into the run's folder: `group` opens it to the group that it belongs to. Null: only its owner.
    Neither changes a folder that is more open already."""
    checkpoint: Annotated[CheckpointSpec, Mark.MANNER] = CheckpointSpec()
    """When to save, and what to keep. With neither `every` nor `minutes`, a checkpoint is saved every 10 minutes."""
    loader_workers: Annotated[CountOrZero, Mark.MANNER] = 0
    """Processes per worker that prefetch samples."""
    loader_prefetch: Annotated[Count, Mark.MANNER] = 2
    """Batches that each of the `loader_workers` keeps ready."""
    links: Annotated[Literal["auto", "tcp"], Mark.MANNER] = "auto"
    """How workers exchange gradients: `auto` uses shared memory between workers of one host, `tcp` never does."""
    encrypt: Annotated[bool | Literal["auto"], Mark.MANNER, Allowed("auto, true or false")] = "auto"
    """Encrypt the connections between the processes of a job (TLS, with certificates made for the job). `auto`: if they
    run on several hosts. With `true`, workers of one host do not use shared memory."""
    capture: Annotated[bool, Mark.MANNER] = True
    """On a GPU, record a lane's kernels in a CUDA graph and replay them. Code that cannot be recorded runs as usual."""
    overlap: Annotated[bool, Mark.MANNER] = True
    """Send gradients while the backward pass still runs (`ring` over the network, and `ddp`)."""
    reuse: Annotated[bool | None, Mark.MANNER, Allowed("true, false or null")] = None
    """Look through the runs for one of the same identity first, and give its result instead of training again, or
    continue it if it is shorter. Null: only the trials of a search."""
    check_gradients: Annotated[CheckGradientsSpec | None, Mark.MANNER] = None
    """Every N steps, workers compare their gradients before the optimizer uses them (`ring` and `ddp`). If they differ,
    a message names the tensor and the workers."""
    audit: Annotated[AuditSpec, Mark.MANNER] = AuditSpec()
    """Compute one lane in `every` a second time, in another worker if there is one, and compare the results (`ring`,
    and synchronous `parameter-server`). A worker that computes wrongly is replaced, and code whose result is not a
    function of its lane is refused."""
    record: Annotated[Literal["lanes", "tensors"] | None, Mark.MANNER, Allowed("lanes, tensors or null")] = None
    """Write down the digest of each lane's gradient in every step, so that `quorate diff` names the first lane in which
    two runs differ (`ring`, and synchronous `parameter-server`). `tensors`: of each tensor, too, which costs more."""
    track: Annotated[TrackSpec | None, Mark.MANNER] = None
    notify: Annotated[NotifySpec | None, Mark.MANNER] = None
    callbacks: Annotated[
        list[Annotated[str, AfterValidator(_placed_reference)]],
        Mark.MANNER,
        Allowed("a list of classes, such as [tell.py:Tell]"),
    ] = []
    """Subclasses of `quorate.Callback`, which are called after steps, evaluations and checkpoints. A file is relative
    to the job file."""
    train_metrics_every: Annotated[OptionalCount, Mark.MANNER] = None
    """Also compute the task's `metrics()` of the training batch of every N-th step; null: never."""
    port: Annotated[int, Mark.MANNER, Field(ge=0, le=65535), Allowed("a port from 0 (any free one) to 65535")] = 0
    """The coordinator's port; 0 takes a free one."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Mark.MANNER] = "info"
    """The lowest level that is logged."""

    def worker_count(self, cores: int) -> int:
        """How many workers to start on a machine with so many cores; on a cluster as many as can be of use: those for
        whom there is no room yet are waited for while the others train."""
        if self.workers != "auto":
            return self.workers
        if self.engine.is_cluster:
            return max(self.min_workers, self.lanes)
        return max(self.min_workers, min(self.lanes, cores // self.threads))


def mark_of(key: str) -> Mark:
    """Of a dotted key: its own, or that of the section or mapping that it stands in."""
    while (found := _KEYS.get(key)) is None or found.mark is None:
        key, _, _ = key.rpartition(".")
    return found.mark


_KEYS = keys_of(JobSpec)


def job_secrets(spec: JobSpec) -> Iterator[str]:
    """Parameters that are named like secrets, the key of its checkpoints, and what a webhook's address gives away."""
    yield from secrets_in(spec.params)
    if spec.notify is not None and spec.notify.webhook:
        yield from url_secrets(spec.notify.webhook)
    if spec.checkpoint.sealing is not None:
        yield from spec.checkpoint.sealing.secrets()


@dataclass(frozen=True)
class TaskReference:
    """A class in a Python file or in an importable module; exactly one of `file` and `module` is set."""

    class_name: str
    file: Path | None = None
    module: str | None = None

    @classmethod
    def parse(cls, text: str) -> "TaskReference":
        """The reference that a text spells. Raises ValueError that says what to write instead."""
        location, colon, class_name = text.rpartition(":")
        if not colon:
            raise ValueError(f"Name the class after a colon: {text or 'task.py'}:MyTask.")
        if not class_name.isidentifier():
            raise ValueError(f"The name of a class must follow the colon, not {class_name!r}.")
        if location.endswith(".py"):
            return cls(class_name, file=Path(location))
        if "/" in location:
            raise ValueError(f"A file's name ends in .py: {location}.py:{class_name}.")
        if not all(part.isidentifier() for part in location.split(".")):
            raise ValueError(f"A file or a module must come before the colon, not {location!r}.")
        return cls(class_name, module=location)

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.class_name}"

    def within(self, folder: Path) -> "TaskReference":
        """The same reference with its file made absolute: workers do not stand where the command was typed."""
        if self.file is None:
            return self
        return replace(self, file=(folder / self.file.expanduser()).resolve())
