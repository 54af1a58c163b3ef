"""What to do next with a save: decided from what is known, without a clock, a thread or a disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quorate.core.generation import DISK, OTHERS


@dataclass(frozen=True)
class Answer:
    """What a worker says before a save. That of the one that hosts lane 0, which commits, decides.

    `attempt` is what it has begun, `failure` why it could not; `lacked_space`: its last save failed for want of space.
    `whole` are step and phase of the newest checkpoint that it knows to be whole.
    """

    identity: str
    is_busy: bool = False
    is_saved: bool = False
    attempt: str = ""
    failure: str = ""
    lacked_space: bool = False
    whole: tuple[int, int] | None = None


class Action(Enum):
    """What a worker does next for a save."""

    COPY = auto()
    WRITE = auto()
    WAIT = auto()
    COMMIT = auto()
    FINISH = auto()
    GIVE_UP = auto()


@dataclass(frozen=True)
class Decision:
    """An action, and what it waits for, or why a save is given up: as it is shown to people."""

    action: Action
    reason: str = ""


@dataclass(frozen=True)
class SaveProgress:
    """How far one worker has come with a save.

    `is_complete`: all parts are there, and all writers have found that they hold the same state, so nobody else is
    needed any more. `may_commit`: this worker may act for its job, and all that led to this state has been told.
    """

    commits: bool
    is_copied: bool = False
    is_written: bool = False
    is_complete: bool = False
    may_commit: bool = False
    is_committed: bool = False
    given_up: str | None = None


def decide(save: SaveProgress) -> Decision:
    """What is to be done next. A commit cannot be taken back: one that is given up afterwards is a checkpoint."""
    stages = (
        (save.is_committed, Action.FINISH, ""),
        (save.given_up is not None, Action.GIVE_UP, save.given_up or ""),
        (not save.is_copied, Action.COPY, "a copy of the state"),
        (not save.is_written, Action.WRITE, DISK),
        (not save.commits, Action.FINISH, ""),
        (not save.is_complete, Action.WAIT, OTHERS),
        # Between two generations, or without a lease: it may come back, or all may be given up.
        (not save.may_commit, Action.WAIT, "leave of the coordinator to commit"),
        (True, Action.COMMIT, DISK),
    )
    return next(Decision(action, reason) for applies, action, reason in stages if applies)


def why_void(
    writers: Sequence[str], present: Collection[str], *, is_saved: bool, delivered: Collection[int]
) -> str | None:
    """Why a save of the last generation cannot be completed by those who are present now; None if it can be, or is.

    `writers` and those `present`, who have begun it too, are identities; the first writer commits. `is_saved`: it is
    here to do so, or has. `delivered` are the positions of the writers that nothing is missing of.
    """
    if not is_saved:
        # Also when our part is done: nobody else knows by now that it was not committed.
        return "the worker that commits it is gone, or has not begun it"
    missing = {writer for position, writer in enumerate(writers) if position not in delivered}
    return None if missing <= set(present) else "a worker that writes a part of it is gone, or has not begun it"
