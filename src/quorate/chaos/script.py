"""Faults that are brought about on purpose, with the proof that each came about (a marker in the logs of its run); the
language of fault scripts; and scripts that chance has written."""

import contextlib
import difflib
import json
import logging
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quorate.core.digests import derive_seed
from quorate.core.errors import RequestError
from quorate.core.generation import Role, file_name_of, name_of, server_id
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


# --- the language

FORMS = """
kill worker 1 at step 20
stop worker 0 at step 15 for 3s
kill worker 1 at step 30 in exchange                # what the worker is doing then
kill worker 1 at step 30 in exchange after 5ms      # not when it begins with that, but so much later
kill all at step 40
slow worker 1 4x from step 10                       # its lanes take four times as long from then on
flip worker 1 at step 60                            # one bit of its state changes, as bad memory does
corrupt worker 1 from step 10                       # a bit of each gradient that it computes is wrong from then on
corrupt worker 1 from step 10 in one bit            # always the same bit
starve worker 1 at step 10                          # it gets no more memory, and gives up
kill loader of worker 1 at step 10                  # with loader_workers
term worker 1 at step 5                             # it is asked to leave, as on a machine that is taken away
cut worker 2 at step 10 for 8s                      # nobody reaches it, and it reaches nobody
kill coordinator at step 30
kill launcher at step 30                            # the run is taken up again by `quorate resume`
add worker at step 12
remove worker at step 20
kill server 1 at step 20                            # a parameter server, with `strategy: parameter-server`
remove server at step 30                            # it hands over what it holds, and goes
"""
"""Each kind of fault once."""
EXAMPLE = "kill worker 1 at step 20"
NOMINAL_STEP = 0.05
"""Seconds that a step counts for where faults are asked for by time: real ones would give other faults each time."""
CALM = 64
"""Steps before and, twice as many, after a flipped bit in which chance does nothing else: so many until it is found."""
FLIPS = 0.15
MOST_SLOW = 1000
"""So many times as long may a lane of a slow worker take."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_WORKER, _ALL, _LOADER = "worker", "all", "loader of worker"
_VICTIMS: dict[str, tuple[str, ...]] = {
    Act.KILL: (_WORKER, _ALL, _LOADER, Whom.COORDINATOR, Whom.LAUNCHER, Whom.SERVER),
    Act.STOP: (_WORKER, _ALL, Whom.SERVER),
    Act.TERM: (_WORKER, _ALL, Whom.SERVER),
    Act.SLOW: (_WORKER, _ALL),
    Act.FLIP: (_WORKER,),
    Act.CORRUPT: (_WORKER,),
    Act.STARVE: (_WORKER, Whom.SERVER),
    Act.CUT: (_WORKER, Whom.SERVER),
    Act.ADD: (_WORKER, Whom.SERVER),
    Act.REMOVE: (_WORKER, Whom.SERVER),
}
_BEGINNING = re.compile(
    r"(?P<act>\w+) (?P<whom>loader of worker|\w+)(?: (?P<number>[0-9]{1,5}))?(?: (?P<factor>[0-9]+(?:\.[0-9]+)?)x)?"
    r" (?P<when>at|from) step (?P<step>[1-9][0-9]{0,14})(?P<same> in one bit)?(?P<rest>(?: .*)?)"
)
_NOT_OF_SERVERS = ("data", "forward")
"""Phases that servers do not come to: they host no lane."""
_IN_EVERY_STEP = (None, "data", "forward", "exchange", "apply")


class FaultError(RequestError):
    """A fault that cannot be read, or cannot happen in its job."""


def lines_of(text: str, source: str) -> list[tuple[str, str]]:
    """The faults of a script file, one a line, each behind its place; what follows a # is a comment."""
    contents = (line.partition("#")[0].strip() for line in text.splitlines())
    return [(f"{source}, line {number}", content) for number, content in enumerate(contents, 1) if content]


def parse_script(lines: Iterable[tuple[str, str]]) -> tuple[Fault, ...]:
    """All faults of a script, in its order; every mistake in it is told at once."""
    faults, mistakes = [], []
    for place, text in lines:
        try:
            faults.append(parse_fault(text))
        except FaultError as mistake:
            mistakes.append(f"{place}: {mistake.message}")
    if mistakes:
        raise FaultError("\n".join(mistakes))
    return tuple(faults)


def parse_fault(text: str) -> Fault:
    """One fault. A mistake is told with the form that is nearest to what was written."""
    line = " ".join(text.lower().split())
    found = _BEGINNING.fullmatch(line)
    act, whom = (found["act"], found["whom"]) if found else ("", "")
    if found is None or whom not in _VICTIMS.get(act, ()):
        raise _not_understood(line)
    words = found["rest"].split()
    clauses = dict(zip(words[::2], words[1::2], strict=False))
    is_from, is_resize = act in (Act.SLOW, Act.CORRUPT), act in RESIZES
    is_numbered = whom in (_WORKER, _LOADER, Whom.SERVER) and not is_resize
    if (
        len(words) != 2 * len(clauses)
        or not clauses.keys() <= ({"in", "after", "for"} if not is_from else set())
        or clauses.get("in", "data") not in PHASES
        or (found["when"] == "from") is not is_from
        or (found["number"] is not None) is not is_numbered
        or (found["factor"] is not None) is not (act == Act.SLOW)
        or (found["same"] and act != Act.CORRUPT)
    ):
        raise _not_understood(line)
    number = int(found["number"]) if is_numbered else None
    if whom == Whom.SERVER and number is not None:
        number, whom = server_id(number), _WORKER
    try:
        after, seconds = (parse_duration(clauses[word]) if word in clauses else None for word in ("after", "for"))
    except FaultError as error:
        raise FaultError(f"`{line}`: {error.message}") from None
    fault = Fault(
        Act(act),
        number,
        int(found["step"]),
        clauses.get("in"),
        seconds,
        after,
        factor=None if found["factor"] is None else round(float(found["factor"]), 6),
        whom=Whom.LOADER if whom == _LOADER else None if whom in (_WORKER, _ALL) else Whom(whom),
        is_same=bool(found["same"]),
    )
    if (fault.act in LASTING) is not (seconds is not None):
        why = "it does not say for how long: add a time, such as `for 3s`"
        raise FaultError(f"`{line}`: {why if seconds is None else f'{act} does not last: leave out `for`'}")
    if after is not None and (fault.is_outside or fault.act in (Act.FLIP, Act.STARVE)):
        raise FaultError(f"`{line}`: `after` is for signals to a worker: leave it out")
    if fault.factor is not None and not 1 < fault.factor <= MOST_SLOW:
        raise FaultError(f"`{line}`: write a number above 1 and up to {MOST_SLOW} before the x")
    return fault


def _not_understood(line: str) -> FaultError:
    forms = [form.partition("#")[0].strip() for form in FORMS.strip().splitlines()]
    # Of the same act, unless that is misspelt.
    same = [form for form in forms if form.split()[0] == line.partition(" ")[0]] or forms
    near = difflib.get_close_matches(line, same, n=1, cutoff=0.0)[0]
    phases = f"; the phases are {', '.join(PHASES)}" if " in " in line else ""
    return FaultError(f"`{line}` is not understood; a fault is written such as `{near}`{phases}")


def parse_duration(text: str) -> float:
    """Seconds."""
    match = _DURATION.fullmatch(text.lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    # Not below what can be written down again.
    if not 1e-6 <= seconds <= 86_400:
        raise FaultError(f"`{text}` is not a time up to a day: write a number and a unit, such as 500ms, 3s or 2min")
    return round(seconds, 6)


def parse_mean(text: str) -> float:
    """The mean number of steps between two faults: `20 steps`, or a time, in which a step counts for 50 ms."""
    steps = re.fullmatch(r"(\d+)( ?steps?)?", text.strip().lower())
    if steps is None:
        return parse_duration(text.strip()) / NOMINAL_STEP
    if int(steps[1]) == 0:
        raise FaultError("`0` steps are no time between two faults: write 1 or more, such as `20 steps`")
    return float(steps[1])


def check_script(faults: Sequence[Fault], workers: int, steps: int | None, lanes: int, servers: int = 0) -> None:
    """Refuse what cannot happen in a job of so many workers, lanes, servers and, if that is known, steps."""
    mistakes: list[str] = []
    present, there = (workers, servers), (workers, servers)
    for fault in sorted(faults, key=lambda fault: fault.step):
        is_of_servers = fault.whom is Whom.SERVER or (fault.worker is not None and Role.of(fault.worker) is Role.SERVER)
        impossible = _impossible_for_server(fault, there[1]) if is_of_servers else _impossible(fault, there[0], lanes)
        mistakes += [f"`{fault}`: {why}" for why in impossible]
        if steps is not None and fault.step > steps:
            mistakes.append(f"`{fault}`: there is no step {fault.step}; the job has {steps} steps")
        there = _there_after(fault, there, present)
    if mistakes:
        raise FaultError("\n".join(mistakes))


def _impossible_for_server(fault: Fault, servers: int) -> Iterator[str]:
    if not servers:
        yield "the job has no servers; only `strategy: parameter-server` has"
    elif fault.worker is not None and fault.worker >= server_id(servers):
        there = "server 0 only" if servers == 1 else f"servers 0 to {servers - 1}"
        yield f"there is no {name_of(fault.worker)}; the job has {there}"
    elif servers + RESIZES.get(fault.act, 0) < 1:
        yield "the job has one server by then, and needs it"
    if fault.phase in _NOT_OF_SERVERS:
        yield f"servers host no lane, and have no phase {fault.phase}; exchange is the first of their step"


def _impossible(fault: Fault, workers: int, lanes: int) -> Iterator[str]:
    if fault.worker is not None and fault.worker >= workers:
        there = "worker 0 only" if workers == 1 else f"workers 0 to {workers - 1}"
        yield f"there is no worker {fault.worker}; the job runs on {there}"
    if fault.act is Act.FLIP and workers == 1:
        yield "a job of one worker has nobody to compare its state with"
    if not 1 <= workers + RESIZES.get(fault.act, 0) <= lanes:
        yield f"the job has {workers} workers by then, and can have 1 to {lanes}"


def _there_after(fault: Fault, there: tuple[int, int], begun: tuple[int, int]) -> tuple[int, int]:
    """How many workers and servers there are after a fault: who resumes a job begins with as many as the job says."""
    if fault.whom is Whom.LAUNCHER:
        return begun
    more, (workers, servers) = RESIZES.get(fault.act, 0), there
    return (workers, servers + more) if fault.whom is Whom.SERVER else (workers + more, servers)


def random_script(
    seed: int,
    steps: int,
    workers: int,
    mean: float,
    lanes: int,
    *,
    can_cut: bool = False,
    saves_every: int | None = None,
    has_loaders: bool = False,
    servers: int = 0,
) -> tuple[Fault, ...]:
    """Faults at random moments, `mean` steps apart on average: always the same ones for the same arguments.

    The launcher is killed only where there is a checkpoint to go on from by then. What befalls a worker may befall one
    of the servers instead.
    """
    chance = random.Random(derive_seed(seed, "faults", steps, workers, repr(mean)))
    faults: list[Fault] = []
    moment, there = 0.0, (workers, servers)
    while True:
        moment += -math.log(1.0 - chance.random()) * mean
        step = math.ceil(moment)
        if step > steps:
            return tuple(faults)
        present, serving = there
        is_saved = saves_every is not None and step > 2 * saves_every
        fault = _random_fault(
            chance, max(1, step), present, lanes, can_cut=can_cut, is_saved=is_saved, has_loaders=has_loaders
        )
        if is_saved and present > 1 and chance.random() < FLIPS and (not faults or step > faults[-1].step + CALM):
            # It is found by comparing with others: they must be there, and live to see it.
            fault = Fault(Act.FLIP, fault.worker or 0, step)
            moment += 2 * CALM
        elif serving and chance.random() < serving / (serving + present):
            fault = _for_server(fault, serving, chance.random())
        faults.append(fault)
        there = _there_after(fault, there, (workers, servers))


def _for_server(fault: Fault, servers: int, drawn: float) -> Fault:
    """The same for one of the servers, where there is such a thing for them."""
    phase = None if fault.phase in _NOT_OF_SERVERS else fault.phase
    if fault.act in RESIZES:
        return replace(fault, act=Act.ADD if servers == 1 else fault.act, whom=Whom.SERVER)
    is_for_one = fault.worker is not None and fault.whom is None
    if is_for_one and fault.act in (Act.KILL, Act.STOP, Act.TERM, Act.STARVE, Act.CUT):
        return replace(fault, worker=server_id(int(drawn * servers)), phase=phase)
    return fault


def _random_fault(
    chance: random.Random, step: int, workers: int, lanes: int, *, can_cut: bool, is_saved: bool, has_loaders: bool
) -> Fault:
    # By `random` alone, which is the same in every version of Python.
    worker, phase = int(chance.random() * workers), _IN_EVERY_STEP[int(chance.random() * len(_IN_EVERY_STEP))]
    seconds, kind = round(0.1 + chance.random(), 1), chance.random()
    resize = Act.ADD if workers == 1 or (workers < lanes and seconds > 0.6) else Act.REMOVE
    drawn: list[tuple[float, Fault]] = [
        (0.08, Fault(Act.KILL, None, step, phase)),
        (0.20, Fault(Act.STOP, worker, step, phase, seconds)),
        (0.30, Fault(Act.TERM, worker, step, phase)),
        (0.40, Fault(Act.KILL, None, step, phase, whom=Whom.COORDINATOR)),
        (0.44, Fault(Act.KILL, None, step, phase, whom=Whom.LAUNCHER if is_saved else Whom.COORDINATOR)),
        (0.50, Fault(Act.SLOW, worker, step, factor=round(1.5 + 3 * chance.random(), 1))),
    ]
    if lanes > 1:
        drawn.append((0.58, Fault(resize, None, step)))
    if can_cut:
        drawn.append((0.66, Fault(Act.CUT, worker, step, phase, round(seconds * 5, 1))))
    drawn.append((0.72, Fault(Act.STARVE, worker, step, phase)))
    if has_loaders:
        drawn.append((0.80, Fault(Act.KILL, worker, step, phase, whom=Whom.LOADER)))
    usual = Fault(Act.KILL, worker, step, phase)
    return next((fault for limit, fault in drawn if kind < limit), usual)
