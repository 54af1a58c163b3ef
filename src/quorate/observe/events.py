"""The kinds of events, a class for each. `docs/json/events.schema.json` is written from them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Self

from quorate.core.failure import Failure
from quorate.observe.event import HEAD, KINDS, Count, Event, Number, Ranges, UnknownEvent, event, plain, record_in
from quorate.observe.quantities import plural


@dataclass(frozen=True, slots=True)
class ShardReading:
    """How a training set in shards is read, as far as waiting for it depends on it.

    `window_bytes` are what a lane reads from at a time, `memory_bytes` what all lanes of a worker have for that.
    """

    remote: bool = False
    decode: bool = False
    columns: bool = False
    cache: bool = False
    window_bytes: Count = 0
    memory_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class TrainingBlocks:
    """A training set in blocks: how many there are, how many samples a lane shuffles at a time, and the index that
    lists them, with its digest; None for blocks that no file lists."""

    blocks: Count
    window: Count
    reading: ShardReading | None = None
    index: str | None = None
    digest: str | None = None

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "TrainingBlocks | None":
        """From how the order of samples describes itself; None where there are no blocks."""
        data = described.get("data")
        if data is None:
            return None
        reading = data.get("reading")
        # A dataset of the user's may say more of itself.
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        return cls(**{**known, "reading": None if reading is None else ShardReading(**reading)})


@event(kind="run")
class RunBegan(Event):
    """A launcher has started or resumed the run: training begins after `from_step`. `by_units`: lane by lane instead of
    step by step, so that servers may hold more than the last step that all have agreed on."""

    from_step: Count | None = None
    total_steps: Count | None = None
    steps_per_epoch: Count | None = None
    epoch_length: Count | None = None
    dataset_samples: Count | None = None
    lanes: Count | None = None
    data: TrainingBlocks | None = None
    by_units: bool = False


@dataclass(frozen=True, slots=True)
class HostedLanes:
    """A worker of a generation, and the lanes that it hosts."""

    worker: Count
    address: str = ""
    lanes: tuple[Count, ...] = ()


@event(kind="generation")
class GenerationFormed(Event):
    """Who hosts which lanes from now on, after `from_step`; the workers in `behind` copy the state first.

    `mesh` is the mesh of a sharded gang, in words.
    """

    generation: str | None = None
    lanes: Count | None = None
    members: tuple[HostedLanes, ...] | None = None
    from_step: Count | None = None
    behind: tuple[Count, ...] | None = None
    servers: tuple[Count, ...] | None = None
    mesh: str | None = None

    @property
    def computing(self) -> tuple[HostedLanes, ...]:
        """Its workers and the lanes that each computes: where tensors are cut across, several compute the same lanes,
        and the first of them tells."""
        members = list(self.members or ())
        for number, member in enumerate(members):
            if number and self.mesh and not member.lanes:
                members[number] = replace(member, lanes=members[number - 1].lanes)
        return tuple(members)

    @property
    def incarnation(self) -> str:
        """Of the coordinator that has formed it."""
        return str(self.generation).partition(".")[0]

    @property
    def workers(self) -> frozenset[int]:
        return frozenset(member.worker for member in self.members or ())

    @property
    def processes(self) -> frozenset[int]:
        """Its workers and its servers."""
        return self.workers | frozenset(self.servers or ())


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A server, by its id, and how many parameters it holds, as the first holder of each or as a replica."""

    server: Count
    blocks: Count = 0
    primary: Count = 0
    bytes: Count = 0


@event(kind="placement")
class BlocksPlaced(Event):
    """Which share of the parameters each server holds from now on; `blocks` and `bytes` are the totals.

    In a step all lanes together push `pushed` bytes of gradients, and all workers pull `pulled` bytes of values, if
    these are sent: in shared memory they are read in place.
    """

    generation: str | None = None
    blocks: Count | None = None
    bytes: Count | None = None
    servers: tuple[HeldBlocks, ...] = ()
    pushed: Count | None = None
    pulled: Count | None = None


@event(kind="copied")
class StateCopied(Event):
    """Workers that were behind at the beginning of a generation have copied the state."""

    generation: str | None = None
    bytes: Count | None = None
    seconds: Number | None = None


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """The lanes whose loss was not finite, and the samples that they had read. `partial`: the other lanes of the step
    are in the weights, since each is applied by itself."""

    lanes: tuple[Count, ...] = ()
    samples: tuple[Count, ...] = ()
    partial: bool = False


FAMILIES = {"loss": "losses", "learning_rate": "learning_rates", "gradient_norm": "gradient_norms"}
"""What is written of a step for each optimizer (`loss`, or `loss.NAME` for each of several), and the field of it."""

_DIGITS = (
    ("samples_per_second", 1),
    *((f"{each}_s", 6) for each in ("data", "compute", "exchange", "apply", "longest_data")),
)
_SELDOM = (
    "own_order",
    "dropped",
    "planned",
    "draws",
    "log",
    "bad_samples",
    "bad",
    "warnings",
    "loss_scale",
    "overflow",
    "skipped",
    "lanes",
    "tensors",
)
_SELDOM_VALUES = attrgetter(*_SELDOM)


@event(kind="step")
class StepCompleted(Event):
    """A step is in the weights of all workers, unless it was skipped.

    Losses, learning rates and norms are by the names of the optimizers, "" if there is only one; a step that changes
    nothing has no loss (None). `ledger` is the digest of the samples that were used; the last step of an epoch also has
    `dropped` and `planned`. `bad` samples could not be read. `longest_data_s` is how long the worker that got its data
    last has waited for them. `draws`: random numbers are drawn for samples, which differ in the next epoch.
    `loss_scale` is that of `precision: fp16` after the step; if gradients `overflow`, the update was skipped. With
    `record`, `lanes` has the digest of each lane's gradient, and `tensors` that of each of its tensors, lane by lane.
    """

    epoch: Count | None = None
    losses: dict[str, Number | None] = field(default_factory=dict)
    learning_rates: dict[str, Number] = field(default_factory=dict)
    gradient_norms: dict[str, Number] = field(default_factory=dict)
    samples: Count | None = None
    samples_per_second: Number | None = None
    data_s: Number | None = None
    compute_s: Number | None = None
    exchange_s: Number | None = None
    apply_s: Number | None = None
    ledger: str | None = None
    own_order: bool = False
    dropped: tuple[Count, ...] = ()
    planned: str | None = None
    longest_data_s: Number | None = None
    draws: bool = False
    log: dict[str, Any] | None = None
    bad_samples: Count = 0
    bad: Ranges = ()
    warnings: tuple[str, ...] = ()
    loss_scale: Number | None = None
    overflow: bool = False
    skipped: SkippedStep | None = None
    lanes: tuple[str, ...] = ()
    tensors: dict[str, tuple[str, ...]] | None = None

    def by_optimizer(self, *families: str) -> dict[str, float | None]:
        """These numbers by the names under which they are written and shown."""
        return {
            f"{family}.{optimizer}" if optimizer else family: number
            for family in families
            for optimizer, number in getattr(self, FAMILIES[family]).items()
        }

    def own_fields(self) -> dict[str, Any]:
        """By hand, since there is one of these for every step: it takes half the time."""
        content: dict[str, Any] = {} if self.epoch is None else {"epoch": self.epoch}
        for family, field_name in FAMILIES.items():
            for optimizer, number in getattr(self, field_name).items():
                content[f"{family}.{optimizer}" if optimizer else family] = number
        if self.samples is not None:
            content["samples"] = self.samples
        for name, digits in _DIGITS:
            if (number := getattr(self, name)) is not None:
                content[name] = round(number, digits)
        if self.ledger is not None:
            content["ledger"] = str(self.ledger)  # a worker gives what it is made from, to be made when it is told
        if any(seldom := _SELDOM_VALUES(self)):
            content |= {name: plain(value) for name, value in zip(_SELDOM, seldom, strict=True) if value}
        return content

    @classmethod
    def own_record(cls, record: Mapping[str, Any]) -> dict[str, Any]:
        """The same with each family of numbers by optimizer."""
        told, extra = dict[str, Any](), dict[str, Any]()
        for name, value in record.items():
            if name in _AS_WRITTEN:
                told[name] = value
            elif name in FAMILIES:
                told[FAMILIES[name]] = {"": value}
            elif (family := name.partition("."))[0] in FAMILIES:
                told.setdefault(FAMILIES[family[0]], {})[family[2]] = value
            elif name not in HEAD:
                extra[name] = value
        return {**told, "extra": extra} if extra else told


_AS_WRITTEN = frozenset(each.name for each in fields(StepCompleted)) - {"extra", *FAMILIES.values()}


@event(kind="out_of_memory")
class MemoryRanOut(Event):
    """Memory ran out in a step, and the step was redone: from this step on each lane has this number of
    `micro_batches`, of at most this many `samples`. `lanes` and `reason` are known only when it happens, not when a
    step is redone."""

    lanes: tuple[Count, ...] = ()
    micro_batches: Count = 1
    samples: Count = 1
    reason: str | None = None

    @property
    def sentence(self) -> str:
        """For people."""
        where = f" in lane {self.lanes[0]}" if self.lanes else ""
        why = f" ({self.reason})" if self.reason else ""
        parts = f"{self.micro_batches} micro-batches of at most {plural(self.samples, 'sample')}"
        return f"memory ran out at step {self.step:,}{where}{why}: since then each lane computes in {parts}"


@event(kind="evaluation")
class EvaluationDone(Event):
    """The metrics of the validation set; its `bad` samples are listed if they differ from those of the last one."""

    metrics: dict[str, Any] | None = None
    best: bool | None = None
    bad_samples: Count = 0
    bad: Ranges = ()
    warnings: tuple[str, ...] = ()


@event(kind="checkpoint")
class CheckpointSaved(Event):
    """A checkpoint is committed. `added_s` is how long training has waited for it, where it waited longest; `audited`
    the step until which audits had found every worker right."""

    path: str = ""
    bytes: Count | None = None
    seconds: Number | None = None
    copied_s: Number | None = None
    written_s: Number | None = None
    added_s: Number | None = None
    parts: Count | None = None
    audited: Count | None = None


@event(kind="checkpoint_failed")
class CheckpointFailed(Event):
    """A checkpoint could not be saved; training continues."""

    reason: str | None = None


@event(kind="checkpoint_skipped")
class CheckpointSkipped(Event):
    """A checkpoint was skipped."""

    reason: str | None = None


@event(kind="copied_to")
class CheckpointCopied(Event):
    """A checkpoint was copied to another place."""

    place: str | None = None
    checkpoint: str = ""
    bytes: Count | None = None
    seconds: Number | None = None


@event(kind="copy_failed")
class CopyFailed(Event):
    """A checkpoint, or anything at all, could not be copied to another place."""

    place: str | None = None
    checkpoint: str = ""
    reason: str = ""
    missing: Count | None = None
    tries: Count | None = None


@event(kind="copy_recovered")
class CopyRecovered(Event):
    """Copying works again, after `seconds`."""

    place: str | None = None
    seconds: Number | None = None


@event(kind="lost")
class WorkerLost(Event):
    """A worker is lost, which was certain `detect_s` after the first sign of it; the job continues."""

    worker: Count | None = None
    cause: str = ""
    message: str | None = None
    phase: str | None = None
    detect_s: Number | None = None


@event(kind="rollback")
class RolledBack(Event):
    """Replicas differed, or a part of the state was lost, and the job goes back to a step: later steps are recorded
    again."""


@event(kind="coordinator")
class CoordinatorReplaced(Event):
    """Another coordinator has taken over, and waits for the workers and servers to reconnect."""

    incarnation: Count | None = None
    present: Count | None = None


@event(kind="resize")
class Resized(Event):
    """Another number of workers or servers was requested: by a user or, with a `reason`, by the job itself (`grow`)."""

    before: Count | None = None
    workers: Count | None = None
    servers: Count | None = None
    reason: str | None = None

    @property
    def said(self) -> str:
        """With what the job is to go on."""
        if self.servers is not None and self.workers == self.before:
            return plural(self.servers, "server")
        beside = "" if self.servers is None else f", and {plural(self.servers, 'server')}"
        why = "" if self.reason is None else f" ({self.reason})"
        return f"{plural(self.workers or 0, 'worker')} instead of {self.before}{beside}{why}"


@event(kind="stop")
class RunStopped(Event):
    """The job was asked to stop."""

    reason: str | None = None


@event(kind="failure")
class RunFailed(Event):
    """Why the job ended. Its fields are those of the failure, with the kind of failure as `cause`."""

    failure: Failure

    @classmethod
    def of(cls, failure: Failure) -> Self:
        return cls(step=failure.step, failure=failure)

    def own_fields(self) -> dict[str, Any]:
        told = {name: value for name, value in self.failure.to_dict().items() if name not in ("kind", "step")}
        return {**told, "cause": self.failure.kind}

    @classmethod
    def own_record(cls, record: Mapping[str, Any]) -> dict[str, Any]:
        place = {name: record[name] for name in ("time", "step") if name in record}
        return {**place, "failure": failure_in({**record, "kind": str(record.get("cause", ""))})}


@event(kind="finished")
class RunFinished(Event):
    """The job is complete, with its result."""

    weights_digest: str | None = None
    result: dict[str, Any] | None = None


@event(kind="links")
class LinksMeasured(Event):
    """The link of a worker of a generation to the next one, its `peer`: seconds of the fastest of a few round trips
    at the beginning, and the bytes of gradients that go from it to other workers at every step, over links or in shared
    memory. Only in tracked jobs; a single worker has no peer."""

    generation: str | None = None
    worker: Count | None = None
    peer: Count | None = None
    round_trip_s: Number | None = None
    bytes_per_step: Count | None = None


@event(kind="log")
class LogMessage(Event):
    """A message for people; its level is info or warning. Without a level it is a warning."""

    level: str | None = None
    message: str | None = None


def read_event(line: str | bytes) -> Event:
    """The event that a line of `events.jsonl` tells. Raises ValueError for a line that is none."""
    return event_of(record_in(line))


def event_of(record: dict[str, Any]) -> Event:
    """The event of a record that has a kind and a time."""
    if record["kind"] not in KINDS:
        import quorate.observe.seldom_events  # noqa: F401 (it adds its kinds)
    known = KINDS.get(record["kind"])
    if known is not None:
        with suppress(ValueError):
            return known.from_record(record)
    return UnknownEvent(step=record.get("step"), time=record["time"], record=record)


def failure_in(said: Mapping[str, Any]) -> Failure:
    """The failure that somebody has written down, perhaps by another version."""
    known = {each.name: said[each.name] for each in fields(Failure) if each.name in said}
    listed = {name: tuple(told) for name in ("samples", "culprits") if isinstance(told := known.get(name), list)}
    return Failure(**{"kind": "unknown", "message": "no reason was written down", **known, **listed})
