"""What a run has told about the samples of its steps, read back from its `events.jsonl`."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from quorate.data.indices import Ranges, count_in, union
from quorate.data.ledger import Tally
from quorate.history.streaming import blocks_of
from quorate.observe.events import EvaluationDone, RunBegan, StepCompleted, TrainingBlocks
from quorate.observe.jsonl import EventTail

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
