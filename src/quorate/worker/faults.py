"""Faults that a worker brings upon itself, at exactly the moment that a script names, and the proof that it has."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quorate.core.fault import BETWEEN_STEPS, PHASES, Act, Fault
from quorate.storage.atomic import sync_folder, write_new_file

log = logging.getLogger(__name__)

Tell = Callable[[int, str, int | None], None]


@dataclass(frozen=True)
class Firing:
    """A fault that came about: its place in the script, and where the worker was."""

    fault: int
    worker: int
    pid: int
    step: int
    phase: str


def marker_of(logs: Path, fault: int, worker: int) -> Path:
    """The file that says that this worker has met this fault."""
    return logs / f"fault-{fault}-worker-{worker}.fired"


def firings(logs: Path) -> list[Firing]:
    """What has come about so far, in the order of the script."""
    found = []
    for marker in logs.glob("fault-*.fired"):
        with contextlib.suppress(ValueError, TypeError):  # one that is being written
            found.append(Firing(**json.loads(marker.read_text())))
    return sorted(found, key=lambda firing: (firing.fault, firing.worker))


class FaultWatch:
    """Hears what a worker does, passes it on, and has each of its faults come about once in a run.

    A marker is on the disk before the act: who takes the worker's place finds it, and leaves that fault alone. One that
    comes after a delay is marked when the delay is over: a worker that is done, or dead, before has not met it.

    Where a fault is for somebody who is away because of an earlier one, the others do not run far ahead: whether it
    comes about must not depend on how soon a replacement is there.
    """

    def __init__(self, faults: Sequence[Fault], worker: int, workers: int, logs: Path, tell: Tell) -> None:
        self._worker = worker
        self._everyone = range(workers)
        self._logs = logs
        self._tell = tell
        self._faults = tuple(faults)
        self._members: Collection[int] = self._everyone
        self._is_called: Callable[[], bool] = lambda: True
        self._place = (0, "start")
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.concerns(worker) and not self._has_begun(number, fault)
        }

    def enter(self, members: Collection[int], is_called: Callable[[], bool]) -> None:
        """A generation of these members begins; `is_called` is true when it shall end at the next step boundary."""
        self._members, self._is_called = members, is_called

    def tell(self, step: int, phase: str, lane: int | None = None) -> None:
        """The worker begins with this now: if a fault is for this moment, it happens here."""
        self._tell(step, phase, lane)
        self._place = step + 1 if phase in BETWEEN_STEPS else step, phase
        for number, fault in list(self._pending.items()):
            is_dragged_along = self._is_dragged_along(number, fault)
            if is_dragged_along or fault.is_due(step, phase):
                del self._pending[number]
                self._bring_about(number, fault, delay=None if is_dragged_along else fault.after)
        if phase == PHASES["data"] and self._misses_somebody(step):
            # Under a word of its own: whoever waits on purpose is not held up in its step.
            self._tell(step, "wait", lane)
            while self._misses_somebody(step) and not self._is_called():
                time.sleep(0.01)
            self._tell(step, phase, lane)

    def _misses_somebody(self, step: int) -> bool:
        """Whether a fault of an earlier step waits for somebody who is not here."""
        return any(
            fault.step < step and self._needs_the_absent(fault) and not self._has_begun(number, fault)
            for number, fault in enumerate(self._faults)
        )

    def _needs_the_absent(self, fault: Fault) -> bool:
        if len(self._members) == len(self._everyone):
            return False
        # Whoever it is for: it comes when somebody comes back.
        is_about_joining = fault.phase in BETWEEN_STEPS
        return is_about_joining or (fault.worker is not None and fault.worker not in self._members)

    def _has_begun(self, number: int, fault: Fault) -> bool:
        """Whether a fault came about before this process began; one for all has, once the first worker met it."""
        whom = self._everyone if fault.worker is None else [fault.worker]
        return any(marker_of(self._logs, number, worker).exists() for worker in whom)

    def _is_dragged_along(self, number: int, fault: Fault) -> bool:
        """Whether all are to die, and somebody has: nobody may live on, whatever became of the moment for them."""
        return fault.worker is None and fault.act is Act.KILL and self._has_begun(number, fault)

    def _bring_about(self, number: int, fault: Fault, delay: float | None) -> None:
        """Now; or from a thread of its own, while the worker goes on with what it does."""
        if delay is None:
            self._act(number, fault)
            return
        log.warning("the fault `%s` is on its way", fault)
        timer = threading.Timer(delay, self._act, (number, fault))
        timer.daemon = True  # a worker that is done does not wait for its death
        timer.start()

    def _act(self, number: int, fault: Fault) -> None:
        step, phase = self._place
        firing = Firing(number, self._worker, os.getpid(), step, phase)
        try:
            write_new_file(marker_of(self._logs, number, self._worker), [json.dumps(asdict(firing)).encode()])
            sync_folder(self._logs)
        except OSError as error:
            # Without its proof it would come again and again.
            log.warning("the fault `%s` is left out, since it cannot be noted: %s", fault, error.strerror)
            return
        log.warning("the fault `%s` comes about at step %d, in %s", fault, step, phase)
        os.kill(os.getpid(), signal.SIGKILL if fault.act is Act.KILL else signal.SIGSTOP)
