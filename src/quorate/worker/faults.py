"""Faults that a worker brings upon itself, at exactly the moment that a script names, and the proof that it has."""

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quorate.core.errors import OutOfMemory
from quorate.core.fault import BETWEEN_STEPS, PHASES, Act, Fault, Whom
from quorate.core.processes import children_of
from quorate.core.worker_status import WAITING
from quorate.storage.atomic import sync_folder, write_new_file

log = logging.getLogger(__name__)

Tell = Callable[[int, str, int | None], None]

LONGEST_WAIT = 20.0
"""Seconds that workers wait for a fault of the script. One that does not come then is seen not to have come."""

_SIGNALS = {Act.KILL: signal.SIGKILL, Act.STOP: signal.SIGSTOP, Act.TERM: signal.SIGTERM}


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
    return logs / f"fault-{fault}-{'outside' if worker is None else f'worker-{worker}'}.fired"


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
        # Flips a bit of the worker's state, once that is built; tells which.
        self.flip: Callable[[random.Random], str] | None = None
        self._place = (0, "start")
        self._factor = 1.0
        self._given_up: set[int] = set()
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.concerns(worker) and not self._has_begun(number, fault)
        }
        self._outside = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.is_outside and not marker_of(logs, number, None).exists()
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
            if is_dragged_along or (fault.is_due(step, phase) and self._is_noticed(fault)):
                del self._pending[number]
                self._bring_about(number, fault, delay=None if is_dragged_along else fault.after)
        for number, fault in list(self._outside.items()):
            if fault.is_due(step, phase):
                del self._outside[number]
                self._call_for(number)
                met = marker_of(self._logs, number, None)
                self._wait_while(lambda met=met: not met.exists(), lane)  # type: ignore[misc]
        if phase == PHASES["data"] and not self._wait_while(lambda: self._misses_somebody(step), lane):
            self._give_up_on_the_absent(step)

    def _is_noticed(self, fault: Fault) -> bool:
        """Whether anybody can tell that a bit has flipped: where a worker is alone, it comes once another is there."""
        return fault.act is not Act.FLIP or len(self._members) > 1

    def _call_for(self, number: int) -> None:
        """Ask the launcher for a fault from outside, which is to come at this moment."""
        step, phase = self._place
        with contextlib.suppress(OSError):  # another worker was first, or nothing can be written: then it does not come
            write_new_file(call_of(self._logs, number), [json.dumps({"step": step, "phase": phase}).encode()])

    def _wait_while(self, is_early: Callable[[], bool], lane: int | None) -> bool:
        """Wait on purpose, under a word of its own: it is not held up in its step. False if that took too long."""
        if not is_early():
            return True
        step, phase = self._place
        over = time.monotonic() + LONGEST_WAIT
        self._tell(step, WAITING, lane)
        while is_early() and not self._is_called() and time.monotonic() < over:
            time.sleep(0.005)
            self._tell(step, WAITING, lane)  # on purpose, so nobody is to take it for stuck
        self._tell(step, phase, lane)
        return time.monotonic() < over

    def linger(self, phase: str, seconds: float) -> float:
        """Stay in a phase for longer than it took, if this worker is slow by a fault; how many seconds longer."""
        if self._factor == 1.0 or phase != PHASES["forward"]:
            return 0.0
        began = time.perf_counter()
        time.sleep((self._factor - 1.0) * seconds)
        return time.perf_counter() - began

    def _misses_somebody(self, step: int) -> bool:
        """Whether a fault of an earlier step waits for somebody who is not here."""
        return any(
            fault.step < step and self._needs_the_absent(fault) and not self._has_begun(number, fault)
            for number, fault in enumerate(self._faults)
            if number not in self._given_up
        )

    def _give_up_on_the_absent(self, step: int) -> None:
        """Wait no more for those who did not come in time: one that stands by as a spare may never."""
        self._given_up |= {number for number, fault in enumerate(self._faults) if fault.step < step}

    def _needs_the_absent(self, fault: Fault) -> bool:
        if len(self._members) == len(self._everyone):
            return False
        # Whoever it is for: it comes when somebody comes back.
        is_about_joining = fault.phase in BETWEEN_STEPS
        return is_about_joining or (fault.worker is not None and fault.worker not in self._members)

    def _has_begun(self, number: int, fault: Fault) -> bool:
        """Whether a fault came about before this process began; one for all has, once the first worker met it."""
        if fault.is_outside:
            return marker_of(self._logs, number, None).exists()
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
        loaders = children_of(os.getpid()) if fault.whom is Whom.LOADER else {}
        if fault.whom is Whom.LOADER and not loaders:
            log.warning("the fault `%s` cannot come about: this worker has no loaders", fault)
            return
        if not mark(self._logs, Firing(number, self._worker, os.getpid(), step, phase)):
            return
        log.warning("the fault `%s` comes about at step %d, in %s", fault, step, phase)
        if fault.act is Act.SLOW:
            self._factor = fault.factor or 1.0
        elif fault.act is Act.FLIP and self.flip is not None:
            log.warning("%s", self.flip(random.Random(f"{number} {fault}")))
        elif fault.act is Act.STARVE:
            raise OutOfMemory("there is not enough memory for it, by a fault of the script")
        else:
            os.kill(min(loaders, default=os.getpid()), _SIGNALS[fault.act])
