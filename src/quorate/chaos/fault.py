"""A fault that is brought about on purpose (what happens to which worker, at which step, in which phase), and the proof
that it came about: a marker in the logs of its run."""

import contextlib
import json
import logging
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.core.generation import Role, file_name_of, name_of
from quorate.storage.atomic import sync_folder, write_new_file

log = logging.getLogger(__name__)

_NAMES = ("data", "forward", "exchange", "apply", "evaluation", "checkpoint", "copy", "join")
PHASES = {name: "compute" if name == "forward" else name for name in _NAMES}
"""The phases that a fault can name, each with the word by which a worker tells that it is in it."""

BETWEEN_STEPS = frozenset({"copy", "join"})
"""Phases that come before a step; a worker tells them with the step that was completed last."""


class Act(StrEnum):
    """What happens."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"
    SLOW = "slow"
    FLIP = "flip"
    CORRUPT = "corrupt"
    STARVE = "starve"
    CUT = "cut"
    ADD = "add"
    REMOVE = "remove"


class Whom(StrEnum):
    """To whom it happens, if not to a worker itself."""

    COORDINATOR = "coordinator"
    LAUNCHER = "launcher"
    LOADER = "loader"
    SERVER = "server"  # one more, or one less; a certain one is known by its id


RESIZES = {Act.ADD: 1, Act.REMOVE: -1}
"""By how much these change the number of workers, or servers; which one it is, nobody says."""
LASTING = frozenset({Act.STOP, Act.CUT})
"""Acts that last for a time."""


@dataclass(frozen=True)
class Fault:
    """One fault. Without a worker it is for all processes, or for none; without a phase it comes when the step begins.

    `worker` is the id of a worker or a server.

    `seconds` is how long a worker stays stopped or cut off. With `after` it comes so many seconds later than that,
    whatever the worker is doing then. `factor` is how many times as long a worker that is made slow takes for its
    lanes, from that step on; whoever takes its place is as fast as the others. One that is corrupt computes a wrong bit
    in each of its lanes, from that step on: another one each time, or always the same (`is_same`).
    """

    act: Act
    worker: int | None
    step: int
    phase: str | None = None
    seconds: float | None = None
    after: float | None = None
    factor: float | None = None
    whom: Whom | None = None
    is_same: bool = False

    @property
    def is_outside(self) -> bool:
        """Whether it comes from outside of the workers, by the launcher."""
        return self.act is Act.CUT or self.act in RESIZES or self.whom in (Whom.COORDINATOR, Whom.LAUNCHER)

    def __str__(self) -> str:
        whom = self.whom or ("worker" if self.act in RESIZES else "all")
        if self.worker is not None:
            whom = f"loader of {name_of(self.worker)}" if self.whom is Whom.LOADER else name_of(self.worker)
        if self.act is Act.CORRUPT:
            return f"{self.act} {whom} from step {self.step}{' in one bit' if self.is_same else ''}"
        if self.factor is not None:
            return f"{self.act} {whom} {_number(self.factor)}x from step {self.step}"
        within = f" in {self.phase}" if self.phase else ""
        delay = f" after {_plain(self.after)}" if self.after is not None else ""
        time = f" for {_plain(self.seconds)}" if self.seconds is not None else ""
        return f"{self.act} {whom} at step {self.step}{within}{delay}{time}"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Fault":
        whom = None if fields["whom"] is None else Whom(fields["whom"])
        return cls(**fields | {"act": Act(fields["act"]), "whom": whom})

    def is_due(self, step: int, phase: str) -> bool:
        """Whether its moment has come for a worker that tells this step and phase.

        That is its own step; or the first after it that has this phase and that the worker takes part in: not every
        step has an evaluation, and a worker may be away while the others go on.
        """
        begun = step + 1 if phase in BETWEEN_STEPS else step
        return phase == PHASES[self.phase or self._first_phase] and begun >= self.step

    @property
    def _first_phase(self) -> str:
        """What a step begins with: a server reads no data."""
        return "data" if self.worker is None or Role.of(self.worker) is Role.WORKER else "exchange"


@dataclass(frozen=True)
class Firing:
    """A fault that came about: its place in the script, and where the worker was. One from outside has no worker."""

    fault: int
    worker: int | None
    pid: int
    step: int
    phase: str


def marker_of(logs: Path, fault: int, worker: int | None) -> Path:
    """The file that says that this worker has met this fault, or that it has come from outside."""
    return logs / f"fault-{fault}-{'outside' if worker is None else file_name_of(worker)}.fired"


def call_of(logs: Path, fault: int) -> Path:
    """The file that says that the moment of a fault from outside has come: workers wait there until it is met."""
    return logs / f"fault-{fault}.due"


def mark(logs: Path, firing: Firing) -> bool:
    """Write down that a fault comes about, before it does; whether that could be done."""
    try:
        write_new_file(marker_of(logs, firing.fault, firing.worker), [json.dumps(asdict(firing)).encode()])
        sync_folder(logs)
        return True
    except OSError as error:
        # Without its proof it would come again and again.
        log.warning("fault %d is left out, since it cannot be noted: %s", firing.fault, error.strerror)
        return False


def firings(logs: Path) -> list[Firing]:
    """What has come about so far, in the order of the script."""
    found = []
    for marker in logs.glob("fault-*.fired"):
        with contextlib.suppress(ValueError, TypeError):  # one that is being written
            found.append(Firing(**json.loads(marker.read_text())))
    return sorted(found, key=lambda firing: (firing.fault, -1 if firing.worker is None else firing.worker))


def _plain(seconds: float) -> str:
    """A time with its unit: without an exponent, and whole where it is."""
    number, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return _number(number) + unit


def _number(number: float) -> str:
    return f"{number:f}".rstrip("0").rstrip(".")
