"""Whether each sample was used exactly once an epoch: what a run has told of its steps, added up and judged."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

from quorate.core.errors import QuorateError, RunError
from quorate.core.failure import name_samples
from quorate.data.block_sampler import BlockSampler
from quorate.data.indices import Ranges, count_in, joined, numbers_in, ranges_of, union
from quorate.data.ledger import Tally, total
from quorate.data.sampler import Sampler
from quorate.history.streaming import BadPlace, bad_places, blocks_of, index_of
from quorate.observe.events import EvaluationDone, RunBegan, StepCompleted, TrainingBlocks
from quorate.observe.jsonl import EventTail
from quorate.observe.quantities import plural
from quorate.spec.load import load_recorded
from quorate.storage.run_folder import RunFolder

_COUNTED = frozenset({"bad", "dropped", "planned", "skipped"})
_LARGEST = 2**63
# They are written out to be added up, and a file may say anything.
_LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class StepEntry:
    """What a step has told of its samples. The step that ends an epoch also says what was dropped, and what `order()`
    has given for the epoch if the task has an order of its own. What a step that `is_skipped` has read has not gone
    into the weights, and of others `skipped_samples` have not; `bad` samples could not be read at all, and were left
    out of its batch."""

    tally: Tally
    samples: int
    is_own: bool = False
    dropped: tuple[int, ...] = ()
    planned: Tally | None = None
    is_skipped: bool = False
    bad: Ranges = ()
    skipped_samples: int = 0

    @classmethod
    def of(cls, event: StepCompleted) -> "StepEntry":
        """Raises ValueError where a step says nothing about samples, or what cannot be."""
        if event.ledger is None or event.samples is None or not _COUNTED.isdisjoint(event.extra or ()):
            raise ValueError("the step does not record its samples, or not in a readable way")
        if not all(index < _LARGEST for index in event.dropped):
            raise ValueError("a sample has a number that none can have")
        if count_in(bad := _checked(event.bad)) > _LARGEST_BATCH:
            raise ValueError("a step has more bad samples than any can have")
        skipped = event.skipped
        return cls(
            tally=Tally.from_hex(event.ledger),
            samples=event.samples,
            is_own=event.own_order,
            dropped=event.dropped,
            planned=None if event.planned is None else Tally.from_hex(event.planned),
            is_skipped=skipped is not None and not skipped.partial,
            bad=bad,
            skipped_samples=0 if skipped is None else len(skipped.samples) if skipped.partial else event.samples,
        )


@dataclass(frozen=True)
class Course:
    """What a run says when it begins: after which step, how its epochs are, and which blocks it reads, if any."""

    from_step: int
    steps_per_epoch: int
    samples: int
    data: TrainingBlocks | None = None

    @property
    def blocks(self) -> tuple[object, ...] | None:
        """By what the blocks are the same: their index may have been moved."""
        return None if self.data is None else (self.data.blocks, self.data.window, self.data.digest)


@dataclass
class Account:
    """All of it, by step. `other` are steps that were told twice with other samples, `without` counts the tellings that
    say nothing about samples. `evaluated_bad` are samples of the validation set that evaluations left out as bad; those
    that left out most of them left out `evaluated_bad_samples`, and need not have listed all."""

    courses: list[Course] = field(default_factory=list)
    steps: dict[int, StepEntry] = field(default_factory=dict)
    other: set[int] = field(default_factory=set)
    told_again: int = 0
    without: int = 0
    evaluated_bad: Ranges = ()
    evaluated_bad_samples: int = 0

    @classmethod
    def read(cls, path: Path) -> "Account":
        """From a run's events. Every telling of a step counts here, where a timeline keeps the last."""
        account = cls()
        for event in EventTail(path):
            match event:
                case RunBegan(from_step=int(first), steps_per_epoch=int(steps), dataset_samples=int(samples)) if steps:
                    account.courses.append(Course(first, steps, samples, blocks_of(event)))
                case StepCompleted(step=int(step)):
                    account._take(step, event)
                case EvaluationDone():
                    with suppress(ValueError):
                        account.evaluated_bad = union((*account.evaluated_bad, *_checked(event.bad)))
                    most = max(account.evaluated_bad_samples, event.bad_samples, count_in(account.evaluated_bad))
                    account.evaluated_bad_samples = most
        return account

    def _take(self, step: int, event: StepCompleted) -> None:
        try:
            entry = StepEntry.of(event)
        except ValueError:
            self.without += 1
            return
        before = self.steps.setdefault(step, entry)
        if before is not entry:
            self.told_again += 1
            if before != entry:
                self.other.add(step)


def _checked(ranges: Ranges) -> Ranges:
    """Ranges of samples that there can be: a file may say anything. Raises ValueError for others."""
    if not all(first <= last < _LARGEST for first, last in ranges):
        raise ValueError("a sample has a number that none can have")
    return ranges


MOST_PLACES = 100
"""So many places of bad samples are looked up."""
_NAMED = 3
# A sentence names fewer samples; there may be any number.
_MORE_THAN_NAMED = 100


class EpochStatus(StrEnum):
    """What has become of an epoch's samples."""

    WHOLE = "whole"
    INCOMPLETE = "incomplete"
    BROKEN = "broken"


@dataclass(frozen=True)
class EpochEntry:
    """One epoch: the steps of it that the run has come through, what they used, and what that makes of it.

    `reason` says why it is incomplete or broken. `is_own`: the task has an order of its own for it. `skipped_steps`
    have read `skipped_samples`, which went into nothing (on_nonfinite_loss: skip). `bad` samples could not be read
    (on_bad_sample: skip).
    """

    epoch: int
    first_step: int
    last_step: int
    steps: int
    samples: int
    dropped: tuple[int, ...]
    is_own: bool
    status: EpochStatus
    reason: str
    skipped_steps: tuple[int, ...] = ()
    skipped_samples: int = 0
    bad: Ranges = ()

    @property
    def bad_samples(self) -> int:
        return count_in(self.bad)


@dataclass(frozen=True)
class Ledger:
    """The judgement of a run. `problem` is what is wrong beside its epochs, `unplanned` why its steps were not compared
    with the order of the job one by one; each is usually empty. `evaluated_bad` are samples of the validation set that
    could not be read: they are listed, and count for nothing here; not all of `evaluated_bad_samples` need be.
    `bad_places` are where the first bad samples of the training set lie, if that is known."""

    epochs: tuple[EpochEntry, ...] = ()
    samples: int = 0
    told_again: int = 0
    problem: str = ""
    unplanned: str = ""
    evaluated_bad: Ranges = ()
    evaluated_bad_samples: int = 0
    bad_places: tuple[BadPlace, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing departs: no sample was used twice in an epoch, and none was left out without being listed."""
        return not self.problem and self.first_broken is None

    @property
    def first_broken(self) -> EpochEntry | None:
        return next((entry for entry in self.epochs if entry.status is EpochStatus.BROKEN), None)

    @property
    def bad(self) -> Ranges:
        """The bad samples of the training set, each once."""
        return union(chain.from_iterable(entry.bad for entry in self.epochs))

    @property
    def verdict(self) -> str:
        """All of it in a few sentences."""
        broken = self.first_broken
        if self.problem:
            return f"Broken: {self.problem}."
        if broken is not None:
            return f"Broken in epoch {broken.epoch}: {broken.reason}."
        if not self.epochs:
            return "No step is recorded yet, so there is nothing to check."
        return " ".join(f"{sentence}." for sentence in self._sentences())

    def _sentences(self) -> Iterator[str]:
        whole = [entry for entry in self.epochs if entry.status is EpochStatus.WHOLE]
        usual, own = [entry for entry in whole if not entry.is_own], sum(entry.is_own for entry in whole)
        if usual:
            but = ["those listed as dropped"] if any(entry.dropped for entry in usual) else []
            skipped = sum(entry.skipped_samples for entry in usual)
            but += [f"{skipped:,} skipped"] if skipped else []
            count = sum(entry.bad_samples for entry in usual)
            but += [f"{count:,} bad"] if count else []
            but_for = f", but for {' and '.join(but)}" if but else ""
            where = f"epoch {usual[0].epoch}" if len(usual) == 1 else f"each of {len(usual):,} epochs"
            yield f"Whole: each of {plural(self.samples, 'sample')} was used exactly once in {where}{but_for}"
        if own:
            yield f"{plural(own, 'epoch')} used the samples in an order of the task's own, each as often as that has it"
        for entry in self.epochs:
            if entry.status is EpochStatus.INCOMPLETE:
                yield f"Epoch {entry.epoch} is incomplete: {entry.reason}"
        if steps := [step for entry in self.epochs for step in entry.skipped_steps]:
            samples = sum(entry.skipped_samples for entry in self.epochs)
            yield f"Skipped, since the loss was not finite: {_steps(steps)}, with {plural(samples, 'sample')}"
        if bad := self.bad:
            yield f"Left out, since the data do not give them: {_named(bad, count_in(bad))}"
        if self.evaluated_bad:
            named = _named(self.evaluated_bad, self.evaluated_bad_samples)
            yield f"Left out of evaluations: {named} of the validation set"
        if all(entry.is_own for entry in self.epochs):
            return
        if self.unplanned:
            yield f"Single steps were not compared with the order of the job: {self.unplanned}"
        else:
            yield "Every step used the samples that the order of the job gives it"

    def document(self) -> dict[str, Any]:
        """All of it but the places, as `quorate show --ledger --json` prints it (schema in docs/json)."""
        return {
            "whole": self.is_whole,
            "verdict": self.verdict,
            "samples": self.samples,
            "steps_told_again": self.told_again,
            "not_compared": self.unplanned or None,
            "validation_bad_samples": self.evaluated_bad_samples,
            "validation_bad": self.evaluated_bad,
            "epochs": [
                asdict(entry) | {"bad_samples": entry.bad_samples, "reason": entry.reason or None}
                for entry in self.epochs
            ],
        }


def read_ledger(run: RunFolder) -> Ledger:
    """Judge a run by what its folder holds."""
    account = Account.read(run.events_file)
    result = run.whole_result() or {}
    steps = result.get("steps")
    done = steps if type(steps) is int else 0
    if not account.steps and (account.without or (done and not account.courses)):
        raise RunError(
            f"run {run.name} has no ledger: no step in {run.events_file} says which samples it used. An earlier "
            "version may have trained it, or the file is not as it was. Train the job again to have one."
        )
    if account.steps and not account.courses:
        raise RunError(
            f"the ledger of run {run.name} cannot be judged: {run.events_file} does not say how the run began, so the "
            "number of its samples is not known."
        )
    plan, unplanned = None, ""
    try:
        plan = _plan(run, account)
    except QuorateError as error:
        unplanned = error.message.rstrip(".")
    ledger = judge(account, done, plan, unplanned)
    if ledger.is_whole and _is_of_others(account, done, result.get("ledger")):
        ledger = replace(ledger, problem="the weights are made of other samples than the steps have recorded")
    return replace(ledger, bad_places=_places(account, ledger.bad))


def _is_of_others(account: Account, done: int, state: object) -> bool:
    """Whether the state of the run, which passes through checkpoints and copies, says that it is made of other samples:
    a step that was done again, with others, would not be told a second time."""
    if not isinstance(state, str) or not account.courses or account.courses[0].from_step != 0:
        return False
    told = total(entry.tally for step, entry in account.steps.items() if step <= done and not entry.is_skipped)
    return str(told) != state


def _places(account: Account, bad: Ranges) -> tuple[BadPlace, ...]:
    """Where the first of them lie, by the index; none where that cannot be read any more."""
    data = account.courses[-1].data if account.courses else None
    if not bad or data is None:
        return ()
    try:
        return tuple(islice(bad_places(index_of(data), bad), MOST_PLACES))
    except QuorateError:
        return ()


def judge(account: Account, done: int, plan: Sampler | None, unplanned: str = "") -> Ledger:
    """Add up every epoch; all steps up to `done` must have been told. With the order of the job, its plan, each step is
    held against it."""
    if not account.courses:
        return Ledger()
    begin = account.courses[0]
    sizes = list(dict.fromkeys(course.samples for course in account.courses))
    if len(sizes) > 1:
        problem = f"the training set had {' and then '.join(f'{size:,}' for size in sizes)} samples"
        return Ledger(samples=begin.samples, told_again=account.told_again, problem=problem, unplanned=unplanned)
    first = min([course.from_step for course in account.courses] + [step - 1 for step in account.steps]) + 1
    last = max([done, first - 1, *account.steps])
    if last < first:
        return Ledger(samples=begin.samples, unplanned=unplanned)
    epochs = range((first - 1) // begin.steps_per_epoch, (last - 1) // begin.steps_per_epoch + 1)
    entries = tuple(_Epoch(account, begin, epoch, first, last).judged(plan) for epoch in epochs)
    return Ledger(
        entries,
        begin.samples,
        account.told_again,
        unplanned=unplanned,
        evaluated_bad=account.evaluated_bad,
        evaluated_bad_samples=account.evaluated_bad_samples,
    )


class _Epoch:
    """One epoch of an account that reaches from step `first` to step `last`."""

    def __init__(self, account: Account, course: Course, epoch: int, first: int, last: int) -> None:
        per_epoch = course.steps_per_epoch
        begin, end = epoch * per_epoch + 1, (epoch + 1) * per_epoch
        self._epoch = epoch
        self._set = course.samples
        self._begins_late, self._ends_early = first > begin, last < end
        self._range = range(max(first, begin), min(last, end) + 1)
        self._told = {step: account.steps[step] for step in self._range if step in account.steps}
        self._other = account.other
        self._is_own = any(entry.is_own for entry in self._told.values())
        self._dropped = tuple(index for entry in self._told.values() for index in entry.dropped)
        self._bad = joined([numbers_in(entry.bad) for entry in self._told.values() if entry.bad])

    def judged(self, plan: Sampler | None) -> EpochEntry:
        problem = self._problem(None if self._is_own else plan)
        status = EpochStatus.BROKEN if problem else EpochStatus.WHOLE
        begin, end = self._range.start, self._range.stop - 1
        if not problem and (self._begins_late or self._ends_early):
            late = [f"the run began after step {begin - 1:,}, from a checkpoint of another"]
            early = [f"the run has come to step {end:,}"]
            status = EpochStatus.INCOMPLETE
            problem = " and ".join((late if self._begins_late else []) + (early if self._ends_early else []))
        return EpochEntry(
            epoch=self._epoch,
            first_step=begin,
            last_step=end,
            steps=len(self._told),
            samples=sum(entry.samples - entry.skipped_samples for entry in self._told.values()),
            dropped=self._dropped,
            is_own=self._is_own,
            status=status,
            reason=problem,
            skipped_steps=tuple(step for step, entry in self._told.items() if entry.skipped_samples),
            skipped_samples=sum(entry.skipped_samples for entry in self._told.values()),
            bad=ranges_of(self._bad),
        )

    def _problem(self, plan: Sampler | None) -> str:
        missing = [step for step in self._range if step not in self._told]
        if missing:
            return f"{_steps(missing)} did not record which samples were used"
        for step, entry in self._told.items():
            if step in self._other:
                return f"step {step:,} was recorded twice, with other samples the second time"
            if plan is not None:
                planned = Tally.of(plan.epoch_of(step), plan.batch(step))
                if entry.tally + Tally.of(self._epoch, numbers_in(entry.bad)) != planned:
                    return f"step {step:,} did not use the samples that the order of the job gives it"
        return "" if self._begins_late or self._ends_early else self._sum_problem(plan)

    def _sum_problem(self, plan: Sampler | None) -> str:
        planned = next((entry.planned for entry in self._told.values() if entry.planned is not None), None)
        if self._is_own and planned is None:
            return "its last step did not record the order of the epoch"
        used, dropped = sum(entry.samples for entry in self._told.values()), len(self._dropped)
        if not self._is_own and used + dropped + len(self._bad) != self._set:
            left_out = f" and dropped {dropped:,}" if dropped else ""
            left_out += f" and left out {len(self._bad):,} bad ones" if len(self._bad) else ""
            return f"its steps used {plural(used, 'sample')}{left_out}, where the training set has {self._set:,}"
        dropped_tally = Tally.of(self._epoch, self._dropped)
        # Each step has used what the plan gives it, and so has the epoch: to add all samples up takes long.
        if plan is not None and dropped_tally == Tally.of(self._epoch, plan.dropped(self._epoch)):
            return ""
        found = total(entry.tally for entry in self._told.values()) + dropped_tally + Tally.of(self._epoch, self._bad)
        if self._is_own:
            return "" if found == planned else "its steps did not use the samples that the task's own order gives"
        if found == Tally.of_order(self._epoch, range(self._set)):
            return ""
        return "its steps used as many samples as there are, but some of them more than once and others not at all"


def _plan(run: RunFolder, account: Account) -> Sampler | None:
    """What each step should have used; raises QuorateError where that is not known."""
    if not account.courses or all(entry.is_own for entry in account.steps.values()):
        return None
    try:
        spec = load_recorded(run.job_file, {}, []).spec
        recorded = (run.read_environment() or {}).get("torch")
    except QuorateError:
        raise RunError("what the run has recorded of its job cannot be read, and `quorate show` says why") from None
    last = account.courses[-1]
    if any(course.blocks != last.blocks for course in account.courses):
        raise RunError("its parts have read the samples in other blocks, or in other windows")
    if last.data is not None:
        return BlockSampler(spec, index_of(last.data).records, last.data.window)
    # Its shuffling is not promised to stay the same from version to version; for what it was built (+cpu) is no matter.
    here = version("torch").partition("+")[0]
    if recorded is not None and recorded.partition("+")[0] != here:
        raise RunError(f"the run was made with torch {recorded}, and here is {here}")
    # Only here: torch takes seconds to import.
    from quorate.data.sampler import LaneSampler

    return LaneSampler(spec, account.courses[0].samples, lambda _epoch, _generator: None)


def _named(ranges: Ranges, count: int) -> str:
    numbers = chain.from_iterable(range(first, last + 1) for first, last in ranges)
    return name_samples(list(islice(numbers, _MORE_THAN_NAMED)), count)


def _steps(steps: list[int]) -> str:
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    named = ", ".join(f"{step:,}" for step in steps[:_NAMED])
    return f"{'step' if len(steps) == 1 else 'steps'} {named}{more}"
