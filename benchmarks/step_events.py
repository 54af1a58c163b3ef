"""What the events of a run tell about its steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.blocks import Blocks
from quorate.observe.events import StepCompleted
from quorate.observe.jsonl import EventTail

PHASES = ("data", "compute", "exchange", "apply")

Steps = Mapping[int, StepCompleted]
"""The event of each step."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step: of each block, over all, and of each phase on the worker that tells."""

    ms: list[float]
    mean_ms: float
    phases_ms: dict[str, float]

    @property
    def details(self) -> dict[str, float]:
        """As a reading carries them; `other_ms` is what no phase accounts for."""
        phases = {f"{phase}_ms": ms for phase, ms in self.phases_ms.items()}
        return {"mean_ms": self.mean_ms, **phases, "other_ms": self.mean_ms - sum(self.phases_ms.values())}


def read_steps(events_file: Path) -> Steps:
    """The events of all steps."""
    steps = (event for event in EventTail(events_file) if isinstance(event, StepCompleted))
    return {event.step: event for event in steps if event.step is not None}


def step_times(steps: Steps, blocks: Blocks) -> StepTimes:
    """Wall times in steady state: an event carries the moment at which its step was complete."""
    seconds = {step: event.time for step, event in steps.items()}
    measured = [event for step, event in steps.items() if step > blocks.warm_up]
    phases = {phase: sum(getattr(event, f"{phase}_s") for event in measured) / len(measured) * 1000 for phase in PHASES}
    return StepTimes(blocks.ms(seconds), blocks.mean_ms(seconds), phases)
