"""The keys of a job file: what each takes, its default, and whether it changes the bits."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from quorate.core.errors import JobFileError
from quorate.spec.engine import EngineSpec, LocalSpec, RaySpec
from quorate.spec.keys import Allowed, Mark, keys_of
from quorate.spec.migration import VERSION
from quorate.spec.nccl import NcclSpec
from quorate.spec.override import PREFIX
from quorate.spec.rules import AUTO, LOSS_SCALE, OWN_PLACE, broken_rules
from quorate.spec.section import Count, CountOrZero, OptionalCount, OptionalPositive, Positive, Section, spelled_out
from quorate.spec.strategy import RingSpec, StrategySpec
from quorate.spec.tracking import NotifySpec, TrackSpec

USUAL_MINUTES = 10
"""Between two saves of a job that does not say when to save."""
MetricName = Annotated[str, Field(min_length=1), Allowed("the name of a metric")]


def _checked_reference(text: str) -> str:
    TaskReference.parse(text)
    return text


def version_check(present: int) -> Callable[[Any], Any]:
    """Checks the version of a file, and raises ValueError that says what to do about another one."""

    def checked(value: Any) -> Any:
        # Literal[1] alone takes true and 1.0 as well: Python holds them for equal.
        if type(value) is not int or value < present:
            raise ValueError(f"Write version: {present}.")
        if value > present:
            raise ValueError("It was written for a newer Quorate: run `pip install --upgrade quorate`.")
        return value

    return checked


def _checked_variable(name: str | None) -> str | None:
    if name is None:
        return None
    if re.fullmatch(r"[0-9A-Fa-f]{64}", name):
        raise ValueError("This looks like the key itself. Put it into a variable, and name the variable here.")
    if name.startswith(PREFIX):
        raise ValueError(f"Variables that begin with {PREFIX} set keys of the job: choose another name.")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("A name is of letters, digits and underscores, and no digit leads it.")
    return name


AUTO_BATCH = 2**62
"""Stands for `batch_size: auto` until a number is found, before the run has its folder: nothing is trained with it."""


def _batch_number(value: Any) -> Any:
    return AUTO_BATCH if value == AUTO else value


def _batch_in_words(value: int) -> int | str:
    return AUTO if value == AUTO_BATCH else value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        below = 1 << value.bit_length() - 1
        raise ValueError(f"Multiplying by it must not round: write {below} or {2 * below}.")
    return value


class ScheduleSpec(Section):
    """How the learning rate moves: up during `warmup` steps, then towards `final` times the base rate.

    `per` says what is counted, by this schedule or by the task's own: steps if it is not given, or epochs.
    """

    kind: Annotated[
        Literal["constant", "linear", "cosine"] | None,
        Allowed("constant, linear or cosine"),
    ] = None
    warmup: CountOrZero = 0
    final: Annotated[float, Field(ge=0, le=1), Allowed("a fraction from 0 to 1")] = 0.0
    per: Literal["step", "epoch"] | None = None


class EvaluateSpec(Section):
    """When to evaluate, and which metric says that a model is the best so far."""

    every: Annotated[
        Annotated[int, Field(ge=1)] | Literal["epoch", "end"],
        Allowed("a whole number of steps of at least 1, epoch or end"),
    ] = "epoch"
    batch_size: OptionalCount = None
    metric: MetricName | None = None
    mode: Literal["min", "max"] = "min"


class EarlyStopSpec(Section):
    """Stop after `patience` evaluations without a better `metric`."""

    metric: MetricName
    mode: Literal["min", "max"] = "min"
    patience: Count


class AverageSpec(Section):
    """An exponential moving average of the parameters: whether the job evaluates it instead of the parameters."""

    decay: Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
    evaluate: bool = False


class MemorySpec(Section):
    """What is done to need less memory: which modules are computed again in the backward pass, by their names."""

    checkpoint_activations: Annotated[
        bool | Annotated[str, Field(min_length=1)],
        Allowed('true (the blocks that the model repeats), false, or a pattern of module names, such as "blocks.*"'),
    ] = False


class LossScaleSpec(Section):
    """What the loss is multiplied by with `precision: fp16`, and after how many steps without overflow it doubles."""

    initial: Annotated[
        int, Field(ge=1, le=2**40), AfterValidator(_power_of_two), Allowed("a power of two, such as 65536")
    ] = LOSS_SCALE["initial"]
    growth_interval: Count = LOSS_SCALE["growth_interval"]


class EncryptSpec(Section):
    """Where the key lies that checkpoints are encrypted with: a file, or a variable of the environment."""

    key_file: Annotated[str | None, Field(min_length=1), Allowed("the path of a file that holds the key, or null")] = (
        None
    )
    key_env: Annotated[
        str | None,
        AfterValidator(_checked_variable),
        Allowed("the name of an environment variable that holds the key, or null"),
    ] = None


class CheckpointSpec(Section):
    """When to save, which checkpoints to keep, where copies go, and how they are written.

    A save is due every so many steps or at the end of every epoch, every so many minutes, or both. Besides, every
    evaluation that is the best so far is saved, and so is the end.
    """

    every: Annotated[
        Annotated[int, Field(ge=1)] | Literal["epoch"] | None,
        Allowed("a whole number of steps of at least 1, epoch, or null"),
    ] = None
    minutes: Annotated[
        float | None,
        Field(ge=0),
        Allowed(f"a number of minutes, 0 (never by the clock), or null ({USUAL_MINUTES} if `every` is not given)"),
    ] = None
    keep: Count = 3
    keep_every: OptionalCount = None
    to: Annotated[
        list[str], Allowed("a list of places, such as [checkpoints, /mnt/backup] or [checkpoints, s3://bucket/prefix]")
    ] = [OWN_PLACE]
    source: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    digest: Literal["xxh3-128", "sha-256"] = "xxh3-128"
    encrypt: EncryptSpec | None = None

    @property
    def minutes_between(self) -> float | None:
        """How many minutes after a save the next one is due; none if the clock does not count."""
        if self.minutes is None:
            # A job that says nothing must not lose hours when all its workers die.
            return USUAL_MINUTES if self.every is None else None
        return self.minutes or None


class CheckGradientsSpec(Section):
    """After how many steps workers compare their gradients."""

    every: Count


class LineageSpec(Section):
    """What the job was until a step, where that was something else: params of the task, and keys of the job."""

    until: Count
    params: Annotated[dict[str, Any], Allowed("a mapping of the task's own parameters")] = {}
    clip_norm: OptionalPositive = None
    schedule: ScheduleSpec | None = None

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Null is another value than that of the job, which is what is left out here.
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


CHANGEABLE = tuple(key for key in LineageSpec.model_fields if key != "until")
"""The keys that may change while a model is trained: it stays of the same shape, and its data in the same order."""


class JobSpec(Section):
    """A whole job. Each key is marked by whether it affects results (the bits)."""

    version: Annotated[
        Literal[2],
        Mark.LABEL,
        BeforeValidator(version_check(VERSION)),
        Allowed("1 or 2, the versions of the job file that this Quorate reads"),
    ] = VERSION
    name: Annotated[
        str,
        Mark.LABEL,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
        Allowed("a name of letters, digits, dots, dashes and underscores, led by a letter or digit (100 at most)"),
    ] = "job"
    task: Annotated[
        str, Mark.MEANING, AfterValidator(_checked_reference), Allowed("file.py:Class or package.module:Class")
    ]
    params: Annotated[dict[str, Any], Mark.MEANING, Allowed("a mapping of the task's own parameters")] = {}
    lanes: Annotated[Count, Mark.MEANING] = 8
    threads: Annotated[Count, Mark.MEANING] = 1
    batch_size: Annotated[
        int,
        Mark.MEANING,
        Field(ge=1),
        BeforeValidator(_batch_number),
        PlainSerializer(_batch_in_words),
        Allowed("a whole number of at least 1, or auto"),
    ]
    epochs: Annotated[OptionalCount, Mark.MEANING] = None
    steps: Annotated[OptionalCount, Mark.MEANING] = None
    seed: Annotated[
        int, Mark.MEANING, Field(ge=0, lt=2**63), Allowed("a whole number of at least 0 and below 2**63")
    ] = 0
    accumulate: Annotated[Count, Mark.MEANING] = 1
    clip_norm: Annotated[OptionalPositive, Mark.MEANING] = None
    schedule: Annotated[ScheduleSpec | None, Mark.MEANING] = None
    average: Annotated[AverageSpec | None, Mark.MEANING] = None
    last_batch: Annotated[Literal["drop", "keep"], Mark.MEANING] = "drop"
    evaluate: Annotated[EvaluateSpec, Mark.MEANING] = EvaluateSpec()
    early_stop: Annotated[EarlyStopSpec | None, Mark.MEANING] = None
    lineage: Annotated[
        list[LineageSpec],
        Mark.MEANING,
        Allowed("a list of what the job was before, such as [{until: 100, params: {learning_rate: 0.1}}]"),
    ] = []
    on_nonfinite_loss: Annotated[Literal["fail", "skip"], Mark.MEANING] = "fail"
    on_out_of_memory: Annotated[Literal["fail", "shrink"], Mark.MEANING] = "fail"
    on_bad_sample: Annotated[Literal["fail", "skip"], Mark.MEANING] = "fail"
    device: Annotated[Literal["auto", "cpu", "cuda"], Mark.MEANING] = "auto"
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], Mark.MEANING] = "auto"
    loss_scale: Annotated[LossScaleSpec, Mark.MEANING] = LossScaleSpec()
    compile: Annotated[bool | Literal["auto"], Mark.MEANING, Allowed("auto, true or false")] = "auto"
    memory: Annotated[MemorySpec, Mark.MEANING] = MemorySpec()
    deterministic: Annotated[bool, Mark.MEANING] = True
    bucket_mb: Annotated[Positive, Mark.MEANING] = 25.0
    strategy: Annotated[
        StrategySpec,
        Mark.MEANING,
        BeforeValidator(spelled_out),
        Allowed("ring, ddp, fsdp, parameter-server, or a mapping with kind"),
    ] = RingSpec()

    workers: Annotated[
        Annotated[int, Field(ge=1)] | Literal["auto"],
        Mark.MANNER,
        Allowed("a whole number of at least 1, or auto"),
    ] = "auto"
    min_workers: Annotated[Count, Mark.MANNER] = 1
    spares: Annotated[CountOrZero, Mark.MANNER] = 0
    engine: Annotated[
        EngineSpec, Mark.MANNER, BeforeValidator(spelled_out), Allowed("local, ray, or a mapping with kind")
    ] = LocalSpec()
    failure_timeout: Annotated[float, Mark.MANNER, Field(gt=0), Allowed("a number of seconds above 0")] = 5.0
    step_timeout: Annotated[OptionalPositive, Mark.MANNER] = None
    setup_timeout: Annotated[OptionalPositive, Mark.MANNER] = None
    balance: Annotated[Literal["even", "speed"], Mark.MANNER] = "even"
    runs: Annotated[str, Mark.MANNER, Field(min_length=1), Allowed("the path of a folder, as text")] = "runs"
    checkpoint: Annotated[CheckpointSpec, Mark.MANNER] = CheckpointSpec()
    loader_workers: Annotated[CountOrZero, Mark.MANNER] = 0
    loader_prefetch: Annotated[Count, Mark.MANNER] = 2
    links: Annotated[Literal["auto", "tcp"], Mark.MANNER] = "auto"
    encrypt: Annotated[bool | Literal["auto"], Mark.MANNER, Allowed("auto, true or false")] = "auto"
    capture: Annotated[bool, Mark.MANNER] = True
    overlap: Annotated[bool, Mark.MANNER] = True
    nccl: Annotated[NcclSpec, Mark.MANNER] = NcclSpec()
    check_gradients: Annotated[CheckGradientsSpec | None, Mark.MANNER] = None
    track: Annotated[TrackSpec | None, Mark.MANNER] = None
    notify: Annotated[NotifySpec | None, Mark.MANNER] = None
    port: Annotated[int, Mark.MANNER, Field(ge=0, le=65535), Allowed("a port from 0 (any free one) to 65535")] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Mark.MANNER] = "info"

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> "JobSpec":
        problems = broken_rules(dict(self) | {"batch_size": _batch_in_words(self.batch_size)})
        if problems:
            raise JobFileError("the job", problems)
        return self

    def worker_count(self, cores: int) -> int:
        """How many workers to start on a machine with so many cores; on a cluster as many as can be of use: those for
        whom there is no room yet are waited for while the others train."""
        if self.workers != "auto":
            return self.workers
        if isinstance(self.engine, RaySpec):
            return max(self.min_workers, self.lanes)
        return max(self.min_workers, min(self.lanes, cores // self.threads))


def mark_of(key: str) -> Mark:
    """Of a dotted key: its own, or that of the section or mapping that it stands in."""
    while (found := _KEYS.get(key)) is None or found.mark is None:
        key, _, _ = key.rpartition(".")
    return found.mark


_KEYS = keys_of(JobSpec)


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
            raise ValueError(f"After the colon stands the name of a class, not {class_name!r}.")
        if location.endswith(".py"):
            return cls(class_name, file=Path(location))
        if "/" in location:
            raise ValueError(f"A file's name ends in .py: {location}.py:{class_name}.")
        if not all(part.isidentifier() for part in location.split(".")):
            raise ValueError(f"Before the colon stands a file or a module, not {location!r}.")
        return cls(class_name, module=location)

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.class_name}"

    def within(self, folder: Path) -> "TaskReference":
        """The same reference with its file made absolute: workers do not stand where the command was typed."""
        if self.file is None:
            return self
        return replace(self, file=(folder / self.file.expanduser()).resolve())
