"""What follows from an event."""

from dataclasses import dataclass

from quorate.coordinator.actions import Action
from quorate.coordinator.states import State


@dataclass(frozen=True)
class Decision:
    """The state that follows, what to do about it, and why in words."""

    state: State
    actions: tuple[Action, ...]
    reason: str
