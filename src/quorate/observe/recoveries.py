"""What a run has recovered from, by its events: each loss of a worker, and how long it took to go on and to refill.

Steps are told with heartbeats, so they may be written after a loss that came later: what counts is the time at which
an event happened, not its place in the file.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from quorate.observe import events
from quorate.observe.event import Event

_SAID = {
    "killed": "was killed by",
    "exited": "exited",
    "gave_up": "gave up",
    "silent": "has not been heard|has sent no heartbeat|did not come back",
    "diverged": "holds wrong bits|may hold wrong bits|has other settings|may have wrong settings",
}
"""What the sentence about a lost worker says right after its name."""
STALLED, OTHER = "stalled", "other"
CAUSES = (*_SAID, STALLED, OTHER)
"""How a worker can be lost: a closed set, for whoever counts."""

_CAUSE = re.compile(
    r"(?:worker|server) \d+ \([^)]*\) (?:" + "|".join(f"(?P<{cause}>{words})" for cause, words in _SAID.items()) + ")"
)


@dataclass(frozen=True)
class Recovery:
    """One loss, in seconds from one moment to the next.

    `detect_s` is from the first sign of the loss to the loss being certain; `reform_s` from there to the generation
    that went on, and `first_step_s` from there to the first step that is new, None if none was left. `copy_s` is what
    copying state to those behind took, the replacement included; `refill_s` is from the loss to the generation that
    has that worker again, None if none has. `steps_lost` had been completed, and had to be trained again.
    """

    step: int
    cause: str
    worker: int
    detect_s: float
    reform_s: float
    copy_s: float
    first_step_s: float | None
    refill_s: float | None
    steps_lost: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recovered:
    """What all recoveries come to: `times` that training stood still and went on, the `seconds` of that, and the
    `steps` that were trained again. Workers that are lost together are lost once."""

    times: int = 0
    seconds: float = 0.0
    steps: int = 0


def brief(message: str) -> str:
    """The first sentence of an autopsy, which says what happened; hints come after it."""
    return message.partition(". ")[0].rstrip(".")


def cause_of(message: str) -> str:
    """Which of `CAUSES` an autopsy tells."""
    if (found := _CAUSE.match(message)) is not None and found.lastgroup is not None:
        return found.lastgroup
    return STALLED if "step_timeout" in message else OTHER


@dataclass
class _Loss:
    """A lost worker, and what has become of it so far. `last_step` is the last that was completed before, in the
    generation that was formed at `since`; `returned` is when it was known from where the job goes on."""

    worker: int
    time: float
    step: int
    cause: str
    detect: float
    last_step: int
    formed: float | None = None
    from_step: int = 0
    first_step: float | None = None
    refilled: float | None = None
    copied: float = 0.0
    # Whether servers still had all that was completed, wherever the next generation began.
    is_kept: bool = False
    since: float = 0.0
    returned: float | None = None

    @property
    def steps_lost(self) -> int:
        # Who was at a step had completed the one before it, whether or not it could still tell.
        return 0 if self.is_kept else max(0, max(self.last_step, self.step - 1) - self.from_step)

    def recovery(self) -> Recovery | None:
        """What it comes to; none as long as nobody has gone on."""
        if self.formed is None:
            return None
        return Recovery(
            step=self.step,
            cause=self.cause,
            worker=self.worker,
            detect_s=self.detect,
            reform_s=_span(self.time, self.formed),
            copy_s=round(self.copied, 4),
            first_step_s=None if self.first_step is None else _span(self.formed, self.first_step),
            refill_s=None if self.refilled is None else _span(self.time, self.refilled),
            steps_lost=self.steps_lost,
        )


class RecoveryLog:
    """Follows a run's events, however many: it keeps the losses only."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        # Those that later generations and steps have nothing to do with.
        self._closed: list[_Loss] = []
        self._incarnation: str | None = None
        self._members: frozenset[int] = frozenset()
        # By generation, those whose loss it has mended: what is copied at its beginning is copied for them.
        self._mended: dict[str, list[_Loss]] = {}
        self._position = 0
        # When the present generation was formed: steps of before it may be told later.
        self._formed = 0.0
        # Where units are applied one by one, servers hold more than the step that a generation goes on from.
        self._by_units = False

    @classmethod
    def of(cls, state: dict[str, Any]) -> "RecoveryLog":
        """One that goes on where another was (`state`)."""
        log = cls()
        losses = [_Loss(**loss) for loss in state["losses"]]
        log._closed, log._losses = losses[: state["closed"]], losses[state["closed"] :]
        log._incarnation, log._position = state["incarnation"], state["position"]
        log._members = frozenset(state["members"])
        log._by_units, log._formed = state["by_units"], state["formed"]
        log._mended = {generation: [losses[each] for each in mended] for generation, mended in state["mended"].items()}
        return log

    def state(self) -> dict[str, Any]:
        """All that it knows, as JSON has it."""
        losses = [*self._closed, *self._losses]
        place = {id(loss): number for number, loss in enumerate(losses)}
        return {
            "losses": [asdict(loss) for loss in losses],
            "closed": len(self._closed),
            "incarnation": self._incarnation,
            "members": sorted(self._members),
            "mended": {name: [place[id(loss)] for loss in mended] for name, mended in self._mended.items()},
            "position": self._position,
            "by_units": self._by_units,
            "formed": self._formed,
        }

    @property
    def recoveries(self) -> list[Recovery]:
        told = (loss.recovery() for loss in (*self._closed, *self._losses))
        return [recovery for recovery in told if recovery is not None]

    @property
    def total(self) -> Recovered:
        mended = [loss for loss in (*self._closed, *self._losses) if loss.formed is not None]
        returns: dict[float | None, int] = {}
        for loss in mended:
            returns[loss.returned] = max(returns.get(loss.returned, 0), loss.steps_lost)
        times, seconds, until = 0, 0.0, float("-inf")
        for begin, end in sorted((one.time - one.detect, one.first_step or one.formed or one.time) for one in mended):
            times += begin > until
            seconds += max(0.0, end - max(begin, until))
            until = max(until, end)
        return Recovered(times, round(seconds, 4), sum(returns.values()))

    def handle(self, event: Event) -> None:
        match event:
            case events.StepCompleted(step=int(step)):
                self.take_step(step, event.time)
            case events.RunBegan():
                self._position = event.from_step or 0
                self._by_units = event.by_units
            case events.RolledBack(step=int(step)) if self._by_units:
                self._position = min(self._position, step)
                # The next generation may have found that a part of the state is gone.
                for loss in (each for each in self._losses if each.first_step is None):
                    loss.from_step, loss.is_kept, loss.returned = min(loss.from_step, step), False, event.time
            case events.CoordinatorReplaced():  # one that takes the place of another goes on with what it has begun
                self._incarnation = str(event.incarnation)
            case events.WorkerLost(worker=int(worker)):
                self._take_loss(event, worker)
            case events.GenerationFormed():
                self._take_generation(event)
            case events.StateCopied():
                for loss in self._mended.get(str(event.generation), ()):
                    loss.copied += event.seconds or 0.0

    def _take_loss(self, event: events.WorkerLost, worker: int) -> None:
        loss = _Loss(
            worker=worker,
            time=event.time,
            step=self._position if event.step is None else event.step,
            cause=brief(event.message or ""),
            detect=event.detect_s or 0.0,
            last_step=self._position,
            since=self._formed,
        )
        if self._members and worker not in self._members:
            # It was not at work yet, or not again: nobody waits for the next generation on its account.
            loss.formed = loss.first_step = loss.returned = event.time
            loss.from_step = loss.last_step
        self._losses.append(loss)

    def _take_generation(self, event: events.GenerationFormed) -> None:
        if self._incarnation not in (None, event.incarnation):
            # Another launcher, with a coordinator of its own, begins another part of the run: it mends nothing that was
            # lost before.
            self._closed += self._losses
            self._losses = []
            self._mended = {}
        self._incarnation = event.incarnation
        self._members = event.processes
        for loss in self._losses:
            is_mended = False
            if loss.formed is None:
                loss.formed, loss.from_step = event.time, event.from_step or 0
                loss.returned = loss.returned or event.time
                loss.is_kept = self._by_units and loss.last_step <= self._position
                if loss.is_kept:
                    loss.from_step = max(loss.from_step, self._position, loss.step - 1)
                is_mended = True
            if loss.refilled is None and loss.worker in self._members:
                loss.refilled = event.time
                is_mended = True
            if is_mended:
                self._mended.setdefault(str(event.generation), []).append(loss)
        self._formed = event.time
        if not self._by_units and event.from_step is not None:
            # Whoever is lost next loses what is trained from here on, not what is lost already.
            self._position = event.from_step

    def take_step(self, step: int, time: float) -> None:
        if self._by_units or time > self._formed:
            self._position = max(self._position, step)
        for loss in self._losses:
            if loss.formed is None or time <= loss.formed:
                loss.last_step = max(loss.last_step, step) if time > loss.since else loss.last_step
            elif loss.first_step is None and step > loss.from_step:
                loss.first_step = time
        # A million steps should not each look through all losses.
        while self._losses and self._losses[0].first_step is not None and self._losses[0].refilled is not None:
            self._closed.append(self._losses.pop(0))


def _span(begin: float, end: float) -> float:
    return round(max(0.0, end - begin), 4)
