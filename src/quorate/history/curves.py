"""The numbers of a run as curves: named points that its events come to, each of them once.

A run's file tells some steps again: after a rollback, and where a run was resumed from a checkpoint that is older than
its last step. They come to the same numbers, so the first telling is the point and the others are skipped; but where
replicas had differed, what was told before the rollback may be wrong, and then the later telling corrects it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from quorate.observe.event import HEAD, Event
from quorate.observe.events import EvaluationDone, RunFinished, StepCompleted
from quorate.observe.notices import EARLY_STOP

TRAIN, VALIDATION, TIME, SYSTEM = "train", "val", "time", "system"
LOSS = f"{TRAIN}/loss"
_FAMILIES = {"loss": "loss", "learning_rate": "learning_rate", "gradient_norm": "grad_norm"}
_PHASES = ("data", "compute", "exchange", "apply")
_MEASURED = (f"{TIME}/", f"{TRAIN}/throughput")
"""How long something took differs each time that it is done; all else is the same bits."""
_COMPARED = 512
"""So many of the last steps are compared when they are told again: replicas that differ show within 64 steps."""


class Point(NamedTuple):
    """One number of a curve: at a step, and at a time in seconds. `corrects`: an earlier one at this step was wrong."""

    name: str
    value: float
    step: int
    time: float
    corrects: bool = False

    @property
    def milliseconds(self) -> int:
        return round(self.time * 1000)

    @property
    def is_sample(self) -> bool:
        """Whether it is a look at the machine, of which there may be several at a step, or a point of the step."""
        return self.name.startswith(f"{SYSTEM}/")


class StepSet:
    """A set of steps. One bit each: as a set of Python's, ten million steps would take a gigabyte."""

    _PAGE = 4096

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}

    def add(self, step: int) -> bool:
        """Whether it is new."""
        page, bit = divmod(step, self._PAGE)
        bits = self._pages.get(page, 0)
        self._pages[page] = bits | 1 << bit
        return not bits >> bit & 1

    def __contains__(self, step: int) -> bool:
        page, bit = divmod(step, self._PAGE)
        return bool(self._pages.get(page, 0) >> bit & 1)


class Curves:
    """Makes points of events, in the order of the run's file. Which ones is a function of that file alone."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._told: dict[str, StepSet] = {}
        self._recent: dict[tuple[str, int], dict[str, float]] = {}
        self._withheld: StepCompleted | None = None
        self._host: str | None = None
        self.last_step = 0

    def points(self, event: Event) -> list[Point]:
        """The points that an event adds to what was told before it."""
        match event:
            case StepCompleted(step=int(step)):
                self.last_step = max(self.last_step, step)
                is_due = step % self._every == 0
                made = list(_step_points(event, step)) if is_due else []
                new = self._new(event.kind, step, made)
                if new and not is_due:
                    self._withheld = event
                elif new:
                    self._withheld = None
                return made if new else self._corrections(event.kind, step, made)
            case EvaluationDone(step=int(step)):
                made = list(_numbers(VALIDATION, event.metrics or {}, step, event.time))
                new = self._new(event.kind, step, made)
                return made if new else self._corrections(event.kind, step, made)
            case RunFinished():
                return self._last(event)
            case _ if event.kind == SYSTEM:
                return self._samples(event)
        return []

    def _new(self, kind: str, step: int, made: list[Point]) -> bool:
        new = self._told.setdefault(kind, StepSet()).add(step)
        if new and made:
            self._recent[kind, step] = _lasting(made)
            if len(self._recent) > _COMPARED:
                del self._recent[next(iter(self._recent))]
        return new

    def _corrections(self, kind: str, step: int, made: list[Point]) -> list[Point]:
        before = self._recent.get((kind, step))
        if before is None:
            return []
        wrong = {name for name, value in _lasting(made).items() if not _same(value, before.get(name))}
        before.update({point.name: point.value for point in made if point.name in wrong})
        return [point._replace(corrects=True) for point in made if point.name in wrong]

    def _samples(self, event: Event) -> list[Point]:
        """By the fields that the event has: numbers, and mappings of them, of a worker, its machine and its GPUs.

        Machines but for the first are told apart by their names: most jobs have one.
        """
        record = {name: value for name, value in event.to_record().items() if name not in HEAD | {"time", "step"}}
        worker, host = record.pop("worker", None), record.pop("host", None)
        self._host = self._host or host
        machine = SYSTEM if host in (None, "", self._host) else f"{SYSTEM}/{host}"
        own = machine if worker is None else f"{machine}/worker-{worker}"
        gpus = {
            f"{machine}/gpu-{gpu.pop('index', at)}": gpu for at, gpu in enumerate(_mappings(record.pop("gpus", ())))
        }
        parts = {machine: record.pop("machine", None) or {}, **gpus}
        step = self.last_step if event.step is None else event.step
        made = [point for prefix, values in parts.items() for point in _numbers(prefix, values, step, event.time)]
        return made + list(_numbers(own, record, step, event.time))

    def _last(self, event: RunFinished) -> list[Point]:
        """The last step of a job has a point, whatever its number. Where a job was stopped there is more to come."""
        ending = (event.result or {}).get("ending")
        withheld, self._withheld = self._withheld, None
        if withheld is None or withheld.step is None or ending not in ("complete", EARLY_STOP):
            return []
        return list(_step_points(withheld, withheld.step))


def _step_points(event: StepCompleted, step: int) -> Iterator[Point]:
    numbers: dict[str, Any] = {}
    for family, name in _FAMILIES.items():
        for told, value in event.by_optimizer(family).items():
            numbers[f"{name}{told.removeprefix(family)}"] = value
    numbers |= {"throughput": event.samples_per_second, "epoch": event.epoch}
    if event.loss_scale is not None:
        numbers["loss_scale"] = event.loss_scale
    own = event.log or {}
    # A number that the task logs does not take the place of one of these.
    numbers |= {f"{name}.logged" if name in numbers else name: value for name, value in own.items()}
    yield from _numbers(TRAIN, numbers, step, event.time)
    spent = {phase: getattr(event, f"{phase}_s") or 0.0 for phase in _PHASES}
    if (whole := sum(spent.values())) > 0:
        yield from _numbers(TIME, {phase: seconds / whole for phase, seconds in spent.items()}, step, event.time)


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [dict(each) for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


def _numbers(prefix: str, values: Mapping[str, Any], step: int, time: float) -> Iterator[Point]:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Point(f"{prefix}/{name}", float(value), step, time)
        elif isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{name}", value, step, time)


def _lasting(points: Iterable[Point]) -> dict[str, float]:
    return {point.name: point.value for point in points if not point.name.startswith(_MEASURED)}


def _same(one: float, other: float | None) -> bool:
    return one == other or (one != one and other is not None and other != other)
