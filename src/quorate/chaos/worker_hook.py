"""Faults that a worker brings upon itself, at exactly the moment that a script names."""

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from quorate.chaos.script import BETWEEN_STEPS, PHASES, Act, Fault, Firing, Whom, call_of, mark, marker_of
from quorate.coordinator.places import places_of
from quorate.core.errors import OutOfMemory
from quorate.core.generation import WAITING
from quorate.core.processes import children_of
from quorate.storage.atomic import write_new_file
from quorate.storage.run_folder import RunFolder
from quorate.worker.assignment import Assignment, Tell

log = logging.getLogger(__name__)

LONGEST_WAIT = 20.0
"""Seconds that workers wait for a fault of the script. One that does not come then is seen not to have come."""

_SIGNALS = {Act.KILL: signal.SIGKILL, Act.STOP: signal.SIGSTOP, Act.TERM: signal.SIGTERM}


def hook_of(assignment: Assignment, tell: Tell) -> "FaultWatch":
    """The hook of a worker, by what its assignment says of the faults."""
    faults = [Fault.from_dict(fault) for fault in assignment.hook_options["faults"]]
    everyone = places_of(assignment.workers, assignment.hook_options["servers"])
    return FaultWatch(faults, assignment.slot, everyone, RunFolder(Path(assignment.run)).logs, tell)


class FaultWatch:
    """Watches what a worker does, and has each of its faults come about once in a run.

    A marker is on the disk before the act: who takes the worker's place finds it, and leaves that fault alone. One that
    comes after a delay is marked when the delay is over: a worker that is done, or dead, before has not met it.

    Where a fault is for somebody who is away because of an earlier one, the others do not run far ahead: whether it
    comes about must not depend on how soon a replacement is there.
    """

    def __init__(self, faults: Sequence[Fault], worker: int, everyone: Sequence[int], logs: Path, tell: Tell) -> None:
        self._worker = worker
        self._everyone = everyone
        self._logs = logs
        self._tell = tell
        self._faults = tuple(faults)
        self._members: Collection[int] = self._everyone
        self._is_ending: Callable[[], bool] = lambda: True
        self._state: Callable[[], Mapping[str, Any]] | None = None
        self._place = (0, "start")
        self._factor = 1.0
        self._corrupt: Callable[[], random.Random] | None = None
        self._given_up: set[int] = set()
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if not fault.is_outside and fault.worker in (None, worker) and not self._has_begun(number, fault)
        }
        self._outside = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.is_outside and not marker_of(logs, number, None).exists()
        }

    def on_built(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def on_generation(self, members: Collection[int], is_ending: Callable[[], bool]) -> None:
        self._members, self._is_ending = members, is_ending

    def on_phase(self, step: int, phase: str, lane: int | None = None) -> None:
        self._place = step + 1 if phase in BETWEEN_STEPS else step, phase
        for number, fault in list(self._pending.items()):
            # Where all are to die, and somebody has, nobody may live on, whatever became of the moment for them.
            is_dragged_along = fault.worker is None and fault.act is Act.KILL and self._has_begun(number, fault)
            # Where a worker is alone, nobody can tell that a bit has flipped: it comes once another is there.
            is_noticed = fault.act is not Act.FLIP or len(self._members) > 1
            if is_dragged_along or (fault.is_due(step, phase) and is_noticed):
                del self._pending[number]
                self._bring_about(number, fault, delay=None if is_dragged_along else fault.after)
        for number, fault in list(self._outside.items()):
            if fault.is_due(step, phase):
                del self._outside[number]
                self._call_for(number)
                met = marker_of(self._logs, number, None)
                self._wait_while(lambda met=met: not met.exists(), lane)  # type: ignore[misc]
        if phase == PHASES["data"] and not self._wait_while(lambda: self._misses_somebody(step), lane):
            # Wait no more for those who did not come in time: one that stands by as a spare may never.
            self._given_up |= {number for number, fault in enumerate(self._faults) if fault.step < step}

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
        while is_early() and not self._is_ending() and time.monotonic() < over:
            time.sleep(0.005)
            self._tell(step, WAITING, lane)  # on purpose, so nobody is to take it for stuck
        self._tell(step, phase, lane)
        return time.monotonic() < over

    def stretch(self, phase: str, seconds: float) -> float:
        """Stay in a phase for longer than it took, if this worker is slow by a fault; how many seconds longer."""
        if self._factor == 1.0 or phase != PHASES["forward"]:
            return 0.0
        began = time.perf_counter()
        time.sleep((self._factor - 1.0) * seconds)
        return time.perf_counter() - began

    def on_lane(self, gradients: Sequence[Any]) -> None:
        """Flip a bit of what was computed, if this worker is corrupt by a fault."""
        if self._corrupt is None:
            return
        import torch  # only here: the other faults do without

        chance, present = self._corrupt(), [tensor for tensor in gradients if tensor.numel()]
        numbers = chance.choice(present).view(torch.int32)
        # Not of the exponent: what is not finite any more would be found by everybody.
        numbers[chance.randrange(len(numbers))] ^= 1 << chance.randrange(20)

    def _misses_somebody(self, step: int) -> bool:
        """Whether a fault of an earlier step waits for somebody who is not here."""
        if len(self._members) == len(self._everyone):
            return False
        earlier = [(number, fault) for number, fault in enumerate(self._faults) if fault.step < step]
        return any(
            # One about joining comes when somebody comes back, whoever it is for.
            (fault.phase in BETWEEN_STEPS or (fault.worker is not None and fault.worker not in self._members))
            and not self._has_begun(number, fault)
            for number, fault in earlier
            if number not in self._given_up
        )

    def _has_begun(self, number: int, fault: Fault) -> bool:
        """Whether a fault came about before this process began; one for all has, once the first worker met it."""
        if fault.is_outside:
            return marker_of(self._logs, number, None).exists()
        whom = self._everyone if fault.worker is None else [fault.worker]
        return any(marker_of(self._logs, number, worker).exists() for worker in whom)

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
            log.warning("the fault `%s` cannot be injected: this worker has no loaders", fault)
            return
        if not mark(self._logs, Firing(number, self._worker, os.getpid(), step, phase)):
            return
        log.warning("the fault `%s` is injected at step %d, in %s", fault, step, phase)
        if fault.act is Act.SLOW:
            self._factor = fault.factor or 1.0
        elif fault.act is Act.FLIP and self._state is not None:
            log.warning("%s", flip_bit(self._state(), random.Random(f"{number} {fault}")))
        elif fault.act is Act.CORRUPT:
            varying, fixed = random.Random(os.getpid()), f"{number} {fault}"
            self._corrupt = (lambda: random.Random(fixed)) if fault.is_same else (lambda: varying)
        elif fault.act is Act.STARVE:
            raise OutOfMemory("there is not enough memory for it, by a fault of the script")
        else:
            os.kill(min(loaders, default=os.getpid()), _SIGNALS[fault.act])


def flip_bit(state: Mapping[str, Any], chance: random.Random) -> str:
    """Flip one of the upper 16 bits of a value of the state, as bad memory does; which, in words. `state`: tensors.

    Parameters, optimizer values and buffers are as likely as each other, however many there are of each. The value is
    not zero: flips there often change nothing that a step makes of it.
    """
    import numpy  # only here: the other faults need neither
    import torch

    integers = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    kinds: dict[str, list[str]] = {}
    for name, tensor in state.items():
        if tensor.count_nonzero():
            kind = "optimizer" if name.startswith("optimizer ") else "parameter" if tensor.requires_grad else "buffer"
            kinds.setdefault(kind, []).append(name)
    name = chance.choice(kinds[chance.choice(sorted(kinds))])
    tensor = state[name].detach()
    places = tensor.reshape(-1).nonzero()[:, 0]
    place = int(places[chance.randrange(len(places))])
    width = 8 * tensor.element_size()
    bit = chance.randrange(max(0, width - 16), width)
    # Through NumPy: memory that goes bad tells nobody, and torch counts what is written through it.
    raw = tensor.view(integers[width]).numpy()
    where = numpy.unravel_index(place, raw.shape)
    raw[where] ^= raw.dtype.type(1 << bit if bit < width - 1 or width == 8 else -(1 << bit))
    return f"bit {bit} of element {place} of '{name}' has been flipped"
