"""Steps of a run, trained again in a run of their own and held against what the first one recorded."""

import hashlib
import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from quorate.api.evaluate import refuse_unrepeatable
from quorate.api.job import job_text
from quorate.api.prints import Watch
from quorate.api.recorded_run import recorded_environment, recorded_job
from quorate.api.run_part import Accept, Runner, Setup, Show, run_locally
from quorate.api.session import is_private, start_in
from quorate.api.tasks import find_task, refuse_other_code
from quorate.checkpoint.listing import CheckpointInfo, Skipped, Unusable, survey
from quorate.checkpoint.selection import own_among, why_foreign
from quorate.checkpoint.store import CheckpointFolder
from quorate.coordinator.places import Outcome
from quorate.core.errors import CheckpointError, RequestError, RunError
from quorate.core.failure import JobFailed
from quorate.core.generation import Phase
from quorate.core.machine import usable_cores
from quorate.engines.engine import Prepared
from quorate.history.difference import Pair, differing
from quorate.observe.event import Event, plain
from quorate.observe.events import EvaluationDone, RunBegan, StepCompleted
from quorate.observe.jsonl import EventTail
from quorate.spec.device import workers_here
from quorate.spec.job import OWN_PLACE
from quorate.spec.options import LocalSpec
from quorate.spec.resolved import ResolvedJob
from quorate.spec.rules import checked_job
from quorate.storage.identity_file import read_identity, write_identity
from quorate.storage.run_folder import RunFolder, write_creation
from quorate.supervisor.signals import Signals, listening_to_signals
from quorate.supervisor.supervisor import Launch

_OF_A_STEP = ("samples", "ledger", "skipped", "overflow", "dropped", "planned", "bad", "lanes", "tensors", "log")
_UNSEEN: dict[str, Any] = {"track": None, "notify": None, "callbacks": [], "reuse": False}
_ALONE: dict[str, Any] = {"port": 0, "spares": 0, "min_workers": 1, "engine": LocalSpec(), **_UNSEEN}
TWIN = "is of a step that has a later one"
_STEP = StepCompleted().kind
_SPARING = {"every": None, "keep": 1, "keep_every": None, "to": [OWN_PLACE]}


@dataclass(frozen=True)
class Difference:
    """The first step that gives something else than was recorded: what, and both values, the recorded one first."""

    step: int
    values: dict[str, Pair]

    def __str__(self) -> str:
        told = "; ".join(f"{name} {then} recorded, {now} now" for name, (then, now) in self.values.items())
        return f"step {self.step:,} differs: {told}"


class Record:
    """What the events of a run say of its steps after `first` up to `last`, and of evaluations in between. The steps
    that a branch has behind it when it begins are not in its record, and are not compared."""

    def __init__(self, run: RunFolder, first: int, last: int) -> None:
        self.newest = 0
        self.difference: Difference | None = None
        self.evaluated: set[int] = set()
        self.begun: list[RunBegan] = []
        self._first = first
        self._told: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._again: set[tuple[str, int]] = set()
        for event in EventTail(run.events_file):
            if isinstance(event, RunBegan):
                self.begun.append(event)
            if (facts := facts_of(event)) and event.step is not None:
                self.newest = max(self.newest, event.step)
                if isinstance(event, EvaluationDone):
                    self.evaluated.add(event.step)
                if first < event.step <= last:
                    self._told.setdefault((event.kind, event.step), []).append(facts)

    @property
    def begin(self) -> int:
        """The step after which the run itself began."""
        return min((each.from_step or 0 for each in self.begun), default=0)

    @property
    def compared(self) -> int:
        """How many steps."""
        return sum(kind == _STEP for kind, _ in self._again)

    def lacks_evaluation(self, info: CheckpointInfo, every: int | str) -> bool:
        """Whether the run was interrupted after it saved this checkpoint, and before the evaluation that was due."""
        step, begun = info.cursor.step, self.begun[-1] if self.begun else RunBegan()
        if info.cursor.phase is Phase.EVALUATED or step < self.newest or step in self.evaluated or not self.evaluated:
            return False
        period = begun.steps_per_epoch if every == "epoch" else every
        return step == begun.total_steps or (isinstance(period, int) and step % period == 0)

    def hold_against(self, event: Event, *, may_lack: int | None = None) -> None:
        """Compare a step or an evaluation that was done again with every record of it, to the last bit. One without a
        record is a difference, but for an evaluation of step `may_lack`."""
        facts, step = facts_of(event), event.step
        if not facts or step is None or self.difference is not None:
            return
        if not max(self.begin, self._first) < step <= self.newest:
            return
        self._again.add((event.kind, step))
        lacks = isinstance(event, EvaluationDone) and step == may_lack
        told = self._told.get((event.kind, step), [] if lacks else [{}])
        values = next(filter(None, (differing(each, facts) for each in told)), None)
        self.difference = None if values is None else Difference(step, values)

    def find_missing(self) -> None:
        """When all is done again, what was recorded and has not come is a difference, too. A job that was made longer
        does not evaluate where a shorter one ended."""
        lengths = {each.total_steps for each in self.begun} - {each.total_steps for each in self.begun[-1:]}
        for kind, step in sorted(self._told.keys() - self._again, key=lambda each: each[1]):
            if self.difference is None and step > self.begin and (kind == _STEP or step not in lengths):
                self.difference = Difference(step, {kind: (self._told[kind, step][0], None)})


def facts_of(event: Event) -> dict[str, Any]:
    """What an event says that the bits of a run decide; nothing of other kinds of events."""
    if isinstance(event, EvaluationDone):
        return {f"metric {name}": value for name, value in (event.metrics or {}).items()}
    if not isinstance(event, StepCompleted):
        return {}
    told = {name: plain(value) for name in _OF_A_STEP if (value := getattr(event, name))}
    return {**event.by_optimizer("loss", "learning_rate", "gradient_norm"), **told}


@dataclass(frozen=True)
class Again:
    """Steps that were trained again, by the run in a folder, which has a checkpoint of the last one."""

    folder: str
    from_step: int
    step: int
    workers: int
    state_digest: str
    compared: int
    difference: Difference | None

    @property
    def run(self) -> RunFolder:
        return RunFolder(Path(self.folder))


@dataclass
class Trainer:
    """Trains steps of a run again, each time in a folder of its own. The run itself is only read."""

    run: RunFolder
    watch: Watch
    runner: Runner = run_locally
    job: ResolvedJob = field(init=False)

    def __post_init__(self) -> None:
        self.job = recorded_job(self.run)
        refuse_unrepeatable(self.run, self.job.spec, "trained again")
        if self.run.stored is not None:
            raise RequestError(
                f"run {self.run.name} is kept in {self.run.stored}. Only those in a folder are repeated."
            )

    def folder_of(self, run: RunFolder) -> CheckpointFolder:
        """The checkpoints of this run, or of one that has trained it again."""
        return CheckpointFolder.of_job(run.checkpoints, self.job.spec.checkpoint)

    def whole_checkpoints(self) -> list[CheckpointInfo]:
        """Those of the run itself that can be read, by their steps; of two at one step the later."""
        return self.sorted_checkpoints()[0]

    def sorted_checkpoints(self) -> tuple[list[CheckpointInfo], dict[str, str]]:
        """The same and, by name, why each other one is left out."""
        folder, there = self.folder_of(self.run), survey(self.run.checkpoints)
        own = own_among([each for each in there if isinstance(each, CheckpointInfo)], self._why_foreign)
        found, left_out = dict[int, CheckpointInfo](), dict[str, str]()
        for each in there:
            if isinstance(each, Skipped) or each not in own:
                left_out[each.path.name] = str(each.kind if isinstance(each, Skipped) else Unusable.FOREIGN)
                continue
            try:
                folder.verify(each)
            except CheckpointError as error:
                left_out[each.path.name] = str(Skipped.of(each.path, error).kind)
                continue
            if (earlier := found.get(each.cursor.step)) is not None:
                left_out[earlier.path.name] = TWIN
            found[each.cursor.step] = each
        return [found[step] for step in sorted(found)], left_out

    def _why_foreign(self, info: CheckpointInfo) -> str:
        return why_foreign(info, self.job.spec)

    def to_step(
        self,
        start: CheckpointInfo | None,
        step: int,
        folder: Path,
        workers: int | None = None,
        kept: CheckpointInfo | None = None,
        ahead: int = 0,
    ) -> Again:
        """Train from a checkpoint, or from the start, to this step, in a new run at `folder`; stops at a difference.
        Without `workers`, on as many as fit here. `kept` is what the run has of this step, if anything; and so many
        steps `ahead` of the last that was recorded are allowed."""
        run, from_step = self.run, 0 if start is None else start.cursor.step
        record = self._record(from_step, step, ahead)
        # Now, since a job that is running removes checkpoints.
        then = "" if kept is None else state_digest(self.folder_of(run), kept)
        again = _new_run(folder, run)
        try:
            if start is not None:  # its own: one of another run would be taken for the beginning of a branch
                start = _copied(start, again, run)
            may_lack = record.newest if kept is None else None
            used = self._train(again, start, step, workers, record, may_lack)
            made = self.folder_of(again)
            there = made.list()
            record.find_missing()
            if record.difference is None and (not there or there[-1].cursor.step != step):
                raise RunError(f"run {run.name} ends before step {step:,} when it is trained again")
        except BaseException as error:
            if not isinstance(error, JobFailed) or error.remains is None:  # of one that failed there are logs
                shutil.rmtree(folder, ignore_errors=True)
            raise
        for info in there[:-1]:
            made.remove(info.path)
        digest, difference = state_digest(made, there[-1]) if there else "", record.difference
        if kept is not None and difference is None:
            difference = _between(kept, then, there[-1], digest)
        if from_step or difference is not None:  # no known result: it has not told of all its steps
            found = read_identity(again) or {}
            write_identity(again, {"unknown": "it is a part of a run", "found": found.get("found", found)})
        return Again(str(again.path), from_step, step, used, digest, record.compared, difference)

    def _record(self, first: int, last: int, ahead: int) -> Record:
        run, record = self.run, Record(self.run, first, last)
        if last > record.newest + ahead:
            raise RunError(f"run {run.name} has recorded no step {last:,}: its last is {record.newest:,}")
        if first < record.begin and not self.job.spec.lineage:
            raise RunError(
                f"run {run.name} is a branch that began at step {record.begin:,} with a checkpoint of another run, and "
                f"has none of its own before step {last:,}. Keep more: `checkpoint.every`, `checkpoint.keep`"
            )
        return record

    def _train(
        self,
        again: RunFolder,
        begin: CheckpointInfo | None,
        step: int,
        workers: int | None,
        record: Record,
        may_lack: int | None,
    ) -> int:
        run, here, stops = self.run, self._job_at(step, record.begun), list[Signals]()
        place, environment = find_task(run, here.spec.task), recorded_environment(run, begin)
        again.write_job(job_text(here), is_private=is_private(here.spec))
        if micro_batches := run.read_micro_batches():
            again.write_micro_batches(micro_batches)

        def checking(launch: Launch, show: Show, accept: Accept, signals: Signals) -> Outcome:
            def accept_same(now: Prepared) -> None:
                refuse_other_code(run, environment, now, "Undo the change, and try again.")
                accept(now)

            def look(event: Event) -> None:
                show(event)
                record.hold_against(event, may_lack=may_lack)
                if record.difference is not None and not stops:
                    stops.append(signals)  # what comes after it would say no more
                    signals.received.append(signal.SIGINT)

            return self.runner(launch, look, accept_same, signals)

        rules = here.spec.checkpoint.model_copy(update=_SPARING)
        spec = here.spec.model_copy(update=_ALONE | {"checkpoint": rules})
        here = replace(here, spec=checked_job(spec.model_dump() | {"workers": workers or "auto"}))
        with listening_to_signals() as signals:
            try:
                start_in(again, here, Setup(place, self.watch, checking, until=step), begin)
            finally:
                for heard in stops:  # whoever listens to several runs hears the person alone
                    heard.received.remove(signal.SIGINT)
        if signals.received:
            raise JobFailed(signals.failure(f"{signals.reason}; run {run.name} is as it was."))
        return workers_here(here.spec, usable_cores())

    def _job_at(self, step: int, begun: Sequence[RunBegan]) -> ResolvedJob:
        """The job as long as it was when a step was trained: a schedule depends on that, and the last evaluation."""
        spec, then = self.job.spec, next((each for each in reversed(begun) if (each.from_step or 0) < step), None)
        if then is None or then.total_steps in (None, begun[-1].total_steps):
            return self.job
        epochs = (then.total_steps or 0) // (then.steps_per_epoch or 1)
        length = {"steps": then.total_steps} if spec.epochs is None else {"epochs": epochs}
        return replace(self.job, spec=spec.model_copy(update=length))


def recreate(trainer: Trainer, step: int, folder: Path | None = None, workers: int | None = None) -> Again:
    """The state of a step of a run, as a checkpoint of a new run: by default `RUN-step-N`, beside the run. It is held
    against the record of the run on the way and, where that has kept a checkpoint of this step, against it."""
    run, there = trainer.run, trainer.whole_checkpoints()
    folder = folder or run.path.with_name(f"{run.name}-step-{step}")
    record, every = Record(run, 0, 0), trainer.job.spec.evaluate.every
    of_step = (info for info in there if info.cursor.step == step and not record.lacks_evaluation(info, every))
    kept = next(of_step, None)
    return trainer.to_step(nearest(there, step - 1), step, folder, workers, kept)


def _new_run(folder: Path, run: RunFolder) -> RunFolder:
    """A new folder, which nobody else has made, for a run that is older than this one, so that `last` stays that."""
    again = RunFolder(folder.absolute())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        again.path.mkdir(0o700)
    except FileExistsError:
        raise RequestError(f"{folder} is already there. Remove it, or name another folder with -o.") from None
    again.make()
    write_creation(again.path, run.created - timedelta(microseconds=1))
    return again


def _copied(start: CheckpointInfo, again: RunFolder, run: RunFolder) -> CheckpointInfo:
    try:
        return replace(start, path=Path(shutil.copytree(start.path, again.checkpoints / start.path.name)))
    except OSError as error:  # a job that is running removes checkpoints
        raise RunError(f"cannot begin from a checkpoint of run {run.name}: {error}. Try again") from None


def _between(kept: CheckpointInfo, then: str, made: CheckpointInfo, now: str) -> Difference | None:
    """How a checkpoint of the run differs from that of the same step trained again: state, and what its manifest says
    of it."""
    before, after = kept.manifest, made.manifest
    told = {"state": (then, now), "weights_digest": (before.weights_digest, after.weights_digest)}
    if kept.cursor == made.cursor:
        told["metrics"] = (json.dumps(before.metrics, sort_keys=True), json.dumps(after.metrics, sort_keys=True))
    values = {name: pair for name, pair in told.items() if pair[0] != pair[1]}
    return Difference(kept.cursor.step, values) if values else None


def nearest(infos: Sequence[CheckpointInfo], step: int) -> CheckpointInfo | None:
    """The last of these that is not after a step; they are in order."""
    return next((info for info in reversed(infos) if info.cursor.step <= step), None)


def state_digest(folder: CheckpointFolder, info: CheckpointInfo) -> str:
    """Sha-256 of all that a checkpoint holds: weights, optimizers, schedules and progress, however it lies in files.
    Two states that go on to the same bits have the same one."""
    from quorate.checkpoint.tree import encode
    from quorate.replica.device import bytes_of

    state = folder.load(info).state
    # One that was begun again after memory ran out knows beforehand from which step on it will.
    known = state["progress"].get("micro_batches", ())
    past = {"micro_batches": [list(change) for change in known if change[0] <= info.cursor.step]}
    encoded = encode(state | {"progress": state["progress"] | past})
    digest = hashlib.sha256(json.dumps(encoded.skeleton, sort_keys=True).encode())
    for name, tensor in sorted(encoded.tensors.items()):
        digest.update(f"\n{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()
