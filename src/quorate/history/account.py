"""What a run has told about the samples of its steps, read back from its `events.jsonl`."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.data.indices import Ranges, count_in, union
from quorate.data.ledger import Tally
from quorate.history.streaming import Streaming
from quorate.observe.event import Event

_LARGEST = 2**63
# They are written out to be added up, and a file may say anything.
_LARGEST_BATCH = 2**24


@dataclass(frozen=True)
class StepEntry:
    """What a step has told of its samples. The step that ends an epoch also says what was dropped, and what `order()`
    has given for the epoch if the task has an order of its own. What a step that `is_skipped` has read has not gone
    into the weights; `bad` samples could not be read at all, and were left out of its batch."""

    tally: Tally
    samples: int
    is_own: bool = False
    dropped: tuple[int, ...] = ()
    planned: Tally | None = None
    is_skipped: bool = False
    bad: Ranges = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "StepEntry":
        """From the fields of a step event. Raises what shows that they are none."""
        planned = fields.get("planned")
        dropped, bad = tuple(int(index) for index in fields.get("dropped", ())), _ranges(fields.get("bad", []))
        if not all(0 <= index < _LARGEST for index in dropped):
            raise ValueError("a sample has a number that none can have")
        if count_in(bad) > _LARGEST_BATCH:
            raise ValueError("a step has more bad samples than any can have")
        return cls(
            tally=Tally.from_hex(fields["ledger"]),
            samples=int(fields["samples"]),
            is_own=bool(fields.get("own_order", False)),
            dropped=dropped,
            planned=None if planned is None else Tally.from_hex(planned),
            is_skipped=fields.get("skipped") is not None,
            bad=bad,
        )


@dataclass(frozen=True)
class Course:
    """What a run says when it begins: after which step, how its epochs are, and which blocks it reads, if any."""

    from_step: int
    steps_per_epoch: int
    samples: int
    streaming: Streaming | None = None


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
        for event in _events(path):
            if event.kind == "run":
                account._begin(event.fields)
            elif event.kind == "step" and type(event.step) is int:
                account._take(event.step, event.fields)
            elif event.kind == "evaluation":
                account._take_evaluation(event.fields)
        return account

    def _begin(self, fields: dict[str, Any]) -> None:
        names = ("from_step", "steps_per_epoch", "dataset_samples")
        told = [value for name in names if type(value := fields.get(name)) is int and value >= 0]
        if len(told) == len(names) and told[1]:
            self.courses.append(Course(told[0], told[1], told[2], Streaming.told(fields)))

    def _take(self, step: int, fields: dict[str, Any]) -> None:
        try:
            entry = StepEntry.of(fields)
        except (KeyError, TypeError, ValueError):
            self.without += 1
            return
        before = self.steps.setdefault(step, entry)
        if before is not entry:
            self.told_again += 1
            if before != entry:
                self.other.add(step)

    def _take_evaluation(self, fields: dict[str, Any]) -> None:
        with suppress(ValueError):
            self.evaluated_bad = union((*self.evaluated_bad, *_ranges(fields.get("bad", []))))
        told = fields.get("bad_samples")
        most = max(self.evaluated_bad_samples, told if type(told) is int else 0)
        self.evaluated_bad_samples = max(most, count_in(self.evaluated_bad))


def _ranges(told: object) -> Ranges:
    """Ranges of samples as an event lists them. Raises what shows that they are none."""
    if not isinstance(told, list):
        raise ValueError("these are no ranges")
    for each in told:
        if not (isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each)):
            raise ValueError("a range has a first and a last sample")
        if not 0 <= each[0] <= each[1] < _LARGEST:
            raise ValueError("a sample has a number that none can have")
    return tuple((first, last) for first, last in told)


def _events(path: Path) -> Iterator[Event]:
    """The events of a file; what a crash has left half written is passed over."""
    try:
        with opened_regular(path) as lines:
            for line in lines:
                try:
                    yield Event.from_json(line.decode())
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    continue
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
