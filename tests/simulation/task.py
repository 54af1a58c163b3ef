"""What a simulated job computes: a chain of digests in which every lane of every step leaves its trace.

A step that is done twice, on another state, with a lane too many or too few, gives another chain than that of the
undisturbed run, for good.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from quorate.core.generation import Cursor, Phase


@dataclass(frozen=True)
class Holding:
    """The state of a replica: where it stands, and what it holds there."""

    cursor: Cursor
    digest: str


@dataclass(frozen=True)
class Course:
    """A job: its steps and lanes, and when it evaluates and saves."""

    steps: int
    lanes: int
    evaluate_every: int
    save_every: int

    def evaluates_at(self, cursor: Cursor) -> bool:
        """Whether an evaluation is due."""
        return cursor.phase is Phase.TRAINED and cursor.step > 0 and cursor.step % self.evaluate_every == 0

    def saves_at(self, cursor: Cursor) -> bool:
        """Whether a checkpoint is due."""
        return cursor.step > 0 and cursor.step % self.save_every == 0


BEGINNING = Holding(Cursor(), "initial weights")

Contribution = tuple[int, str]
"""A lane, and what it contributes to a step."""


def contribute(holding: Holding, lane: int) -> Contribution:
    """What a lane contributes to the step after this state."""
    return lane, f"{holding.cursor.step + 1}.{lane} of {holding.digest}"


def apply_step(holding: Holding, contributions: Iterable[Contribution]) -> Holding:
    """The state after one more step."""
    parts = "\n".join(f"{lane} {content}" for lane, content in sorted(contributions))
    return Holding(holding.cursor.trained(), _digest(f"{holding.digest}\n{parts}"))


def apply_evaluation(holding: Holding) -> Holding:
    """The state after an evaluation."""
    return Holding(holding.cursor.evaluated(), _digest(f"{holding.digest} evaluated"))


def undisturbed(course: Course) -> dict[Cursor, str]:
    """The digest at every cursor that the undisturbed run passes through."""
    holding = BEGINNING
    passed = {holding.cursor: holding.digest}
    while holding.cursor.step < course.steps:
        holding = apply_step(holding, (contribute(holding, lane) for lane in range(course.lanes)))
        passed[holding.cursor] = holding.digest
        if course.evaluates_at(holding.cursor):
            holding = apply_evaluation(holding)
            passed[holding.cursor] = holding.digest
    return passed


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
