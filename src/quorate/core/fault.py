"""A fault that is brought about on purpose: what happens to which worker, at which step, in which phase."""

from dataclasses import dataclass
from enum import StrEnum

PHASES = {
    "data": "data",
    "forward": "compute",
    "exchange": "exchange",
    "apply": "apply",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "copy": "copy",
    "join": "join",
}
"""The phases that a fault can name, each with the word by which a worker tells that it is in it."""

BETWEEN_STEPS = frozenset({"copy", "join"})
"""Phases that come before a step; a worker tells them with the step that was completed last."""


class Act(StrEnum):
    """What happens to a worker."""

    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True)
class Fault:
    """One fault. Without a worker it is for all of them; without a phase it comes when the step begins.

    `seconds` is how long a worker stays stopped. With `after` it comes so many seconds later than that, whatever the
    worker is doing then.
    """

    act: Act
    worker: int | None
    step: int
    phase: str | None = None
    seconds: float | None = None
    after: float | None = None

    def __str__(self) -> str:
        whom = "all" if self.worker is None else f"worker {self.worker}"
        within = f" in {self.phase}" if self.phase else ""
        delay = f" after {_plain(self.after)}" if self.after is not None else ""
        time = f" for {_plain(self.seconds)}" if self.seconds is not None else ""
        return f"{self.act} {whom} at step {self.step}{within}{delay}{time}"

    def concerns(self, worker: int) -> bool:
        """Whether it is for this worker."""
        return self.worker is None or self.worker == worker

    def is_due(self, step: int, phase: str) -> bool:
        """Whether its moment has come for a worker that tells this step and phase.

        That is its own step; or the first after it that has this phase and that the worker takes part in: not every
        step has an evaluation, and a worker may be away while the others go on.
        """
        begun = step + 1 if phase in BETWEEN_STEPS else step
        return phase == PHASES[self.phase or "data"] and begun >= self.step


def _plain(seconds: float) -> str:
    """A time with its unit: without an exponent, and whole where it is."""
    number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return f"{number:f}".rstrip("0").rstrip(".") + unit
