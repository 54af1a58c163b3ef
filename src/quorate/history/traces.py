"""The traces of a run, read back from its events: which there are, and where the time of a step went."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from quorate.core.regular_file import opened_regular
from quorate.core.spans import PUBLISH, STEP, Span, covered
from quorate.core.worker_status import APPLY, CHECKPOINT, COMPUTE, DATA, EVALUATION, EXCHANGE
from quorate.observe.event import Event
from quorate.observe.events import GenerationFormed, StepTraced, WorkerLost, read_event
from quorate.observe.traces import RecoveryTracer, TracedSpan, corrected, run_identity, spans_of, trace_id
from quorate.storage.run_folder import RunFolder

_PHASES = (DATA, COMPUTE, EXCHANGE, APPLY, PUBLISH, EVALUATION, CHECKPOINT)
_KINDS = tuple(f'{{"kind":"{kind.KIND}"'.encode() for kind in (StepTraced, WorkerLost, GenerationFormed))
"""How the lines begin that matter here: of a long run they are a few among very many, and all others are not parsed."""


@dataclass(frozen=True)
class WorkerTime:
    """Where a worker's time of a step went: seconds by phase. What an overlapped exchange does while the worker
    computes is not waited for, and does not count."""

    worker: int
    seconds: float
    phases: dict[str, float]
    covered: float
    clock_offset: float | None
    clock_uncertainty: float | None

    @property
    def rest(self) -> float:
        return max(0.0, self.seconds - sum(self.phases.values()))


@dataclass
class Trace:
    """A step of a generation, as its workers have traced it; with the recovery before it, if there was one."""

    run: str
    generation: str
    step: int
    told: list[StepTraced] = field(default_factory=list)
    recovery: list[TracedSpan] = field(default_factory=list)

    @property
    def id(self) -> str:
        return trace_id(self.run, self.generation, self.step)

    @cached_property
    def spans(self) -> list[TracedSpan]:
        """All of them on one time line."""
        return corrected([*self.recovery, *(span for event in self.told for span in spans_of(self.run, event))])

    @property
    def workers(self) -> list[WorkerTime]:
        steps = [event for event in self.told if event.spans[0].name == STEP]
        return [_time_of(event) for event in sorted(steps, key=lambda event: event.worker)]


def traces_in(run: RunFolder, step: int | None = None, newest: int | None = None) -> list[Trace]:
    """The traces of a run in their order: all, those of a step (trained in several generations), or the newest."""
    identity = run_identity(run)
    recoveries = RecoveryTracer(identity)
    found: dict[tuple[str, int], Trace] = {}
    gone: set[tuple[str, int]] = set()
    for event in _events(run):
        spans = recoveries.handle(event)
        if not isinstance(event, StepTraced) or not event.spans or (step is not None and event.step != step):
            continue
        key = event.generation, event.step or 0
        if key in gone:
            continue  # the checkpoint of a step that is not among the newest any more
        trace = found.setdefault(key, Trace(identity, *key))
        trace.told.append(event)
        trace.recovery += spans
        if newest is not None and len(found) > newest:
            oldest = next(iter(found))
            gone.add(oldest)
            del found[oldest]
    return list(found.values())


def _events(run: RunFolder) -> Iterator[Event]:
    try:
        with opened_regular(run.events_file) as file:
            for line in file:
                if line.startswith(_KINDS) and line.endswith(b"\n"):
                    try:
                        yield read_event(line)
                    except ValueError:
                        continue  # a crash has left half a line
    except FileNotFoundError:
        return


def _place_of(phase: str) -> int:
    return _PHASES.index(phase) if phase in _PHASES else len(_PHASES)


def _time_of(event: StepTraced) -> WorkerTime:
    root = event.spans[0]
    phases: defaultdict[str, float] = defaultdict(float)
    at_work = [span for span in event.spans if span.parent == 0 and span.name != EXCHANGE]
    for span in at_work:
        phases[span.name] += span.seconds
    for span in event.spans:
        if span.name == EXCHANGE:
            beside = Span(EXCHANGE, span.start, span.seconds, 0, {})
            phases[EXCHANGE] += span.seconds * (1.0 - covered((beside, *at_work)))
    return WorkerTime(
        event.worker,
        root.seconds,
        {name: phases[name] for name in sorted(phases, key=_place_of)},
        covered(event.spans),
        event.clock_offset,
        event.clock_uncertainty,
    )
