"""The language of fault scripts, and scripts that chance has written.

::

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

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quorate.chaos.fault import LASTING, PHASES, RESIZES, Act, Fault, Whom
from quorate.core.digests import derive_seed
from quorate.core.errors import RequestError
from quorate.core.generation import Role, name_of, server_id
from quorate.spec.keys import nearest

EXAMPLE = "kill worker 1 at step 20"
NOMINAL_STEP = 0.05
"""Seconds that a step counts for where faults are asked for by time: real ones would give other faults each time."""
CALM = 64
"""Steps before and, twice as many, after a flipped bit in which chance does nothing else: so many until it is found."""
FLIPS = 0.15
MOST_SLOW = 1000
"""So many times as long may a lane of a slow worker take."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min)")
_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}
_MORE = "the end, a phase (`in exchange`), a delay (`after 5ms`) or how long it lasts (`for 3s`)"
_WORKER, _ALL = "worker", "all"
_VICTIMS = {
    Act.KILL: (_WORKER, _ALL, *Whom),
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
_NOT_OF_SERVERS = ("data", "forward")
"""Phases that servers do not come to: they host no lane."""
_IN_EVERY_STEP = (None, "data", "forward", "exchange", "apply")


class FaultError(RequestError):
    """A fault that cannot be read, or cannot happen in its job."""


@dataclass(frozen=True)
class Line:
    """A line of a script, and where it stands."""

    text: str
    place: str


def lines_of(text: str, source: str) -> list[Line]:
    """The faults of a script file, one a line; what follows a # is a comment."""
    contents = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Line(content, f"{source}, line {number}") for number, content in enumerate(contents, 1) if content]


def parse_script(lines: Iterable[Line]) -> tuple[Fault, ...]:
    """All faults of a script, in its order; every mistake in it is told at once."""
    faults, mistakes = [], []
    for line in lines:
        try:
            faults.append(parse_fault(line.text))
        except FaultError as mistake:
            mistakes.append(f"{line.place}: {mistake.message}")
    if mistakes:
        raise FaultError("\n".join(mistakes))
    return tuple(faults)


def parse_fault(text: str) -> Fault:
    """One fault. A mistake is told with what was read, what is expected there, and the nearest word."""
    words = _Words(text)
    act = Act(words.take_one_of([act.value for act in Act], "what happens"))
    worker, whom = _parse_victim(words, act)
    if act is Act.SLOW:
        return _parse_slowness(words, worker)
    if act is Act.CORRUPT:
        return _parse_corruption(words, worker)
    words.take_one_of(["at"], "when it happens, such as `at step 20`")
    words.take_one_of(["step"], "when it happens, such as `at step 20`")
    step = words.take_number("the number of a step", least=1)
    phase, seconds, after = None, None, None
    while not words.are_over:
        match words.take_one_of(["in", "after", "for"], _MORE):
            case "in":
                words.refuse_second(phase, "phases")
                phase = words.take_one_of(list(PHASES), "a phase")
            case "after":
                words.refuse_second(after, "delays")
                after = words.take_time("a delay, such as 5ms")
            case _:
                words.refuse_second(seconds, "times")
                seconds = words.take_time("a time, such as 3s")
    if act in LASTING and seconds is None:
        raise words.mistake("it does not say for how long: add a time, such as `for 3s`")
    if act is Act.KILL and seconds is not None:
        raise words.mistake("who is killed stays dead: leave out `for`, or write stop instead of kill")
    if act not in LASTING and seconds is not None:
        raise words.mistake(f"{act} does not last: leave out `for`")
    fault = Fault(act, worker, step, phase, seconds, after, whom=whom)
    if after is not None and (fault.is_outside or act in (Act.FLIP, Act.STARVE)):
        raise words.mistake("`after` is for signals to a worker: leave it out")
    return fault


def _parse_victim(words: "_Words", act: Act) -> tuple[int | None, Whom | None]:
    """To whom it happens: a worker or a server by its id, and who else if it is not that one itself."""
    victim = words.take_one_of(list(_VICTIMS[act]), "to whom it happens")
    if victim == Whom.LOADER:
        words.take_one_of(["of"], "whose loader, such as `of worker 1`")
        words.take_one_of([_WORKER], "whose loader, such as `of worker 1`")
    if victim == Whom.SERVER and act not in RESIZES:
        return server_id(words.take_number("the number of a server", least=0)), None
    is_numbered = victim == Whom.LOADER or (victim == _WORKER and act not in RESIZES)
    worker = words.take_number("the number of a worker", least=0) if is_numbered else None
    return worker, Whom(victim) if victim not in (_WORKER, _ALL) else None


def _parse_slowness(words: "_Words", worker: int | None) -> Fault:
    """The rest of a fault that makes somebody slow, which lasts."""
    factor = words.take_factor("how many times as long a lane takes, such as 4x")
    step = words.take_beginning()
    if not words.are_over:
        raise words.mistake("whoever is slow stays slow: nothing follows the step")
    return Fault(Act.SLOW, worker, step, factor=factor)


def _parse_corruption(words: "_Words", worker: int | None) -> Fault:
    """The rest of a fault that makes somebody compute wrongly, which lasts."""
    step, is_same = words.take_beginning(), not words.are_over
    for word in ("in", "one", "bit") if is_same else ():
        words.take_one_of([word], "which bit: `in one bit` if it is always the same")
    if not words.are_over:
        raise words.mistake("whoever computes wrongly goes on with it: nothing follows")
    return Fault(Act.CORRUPT, worker, step, is_same=is_same)


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
    mistakes, present, serving = [], workers, servers
    for fault in sorted(faults, key=lambda fault: fault.step):
        impossible = (
            _impossible_for_server(fault, serving) if _is_of_servers(fault) else _impossible(fault, present, lanes)
        )
        mistakes += [f"`{fault}`: {why}" for why in impossible]
        if steps is not None and fault.step > steps:
            mistakes.append(f"`{fault}`: there is no step {fault.step}; the job has {steps} steps")
        present, serving = _present_after(fault, present, workers), _serving_after(fault, serving, servers)
    if mistakes:
        raise FaultError("\n".join(mistakes))


def _is_of_servers(fault: Fault) -> bool:
    return fault.whom is Whom.SERVER or (fault.worker is not None and Role.of(fault.worker) is Role.SERVER)


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
    """What keeps a fault from happening in a job that has so many workers by then."""
    if fault.worker is not None and fault.worker >= workers:
        there = "worker 0 only" if workers == 1 else f"workers 0 to {workers - 1}"
        yield f"there is no worker {fault.worker}; the job runs on {there}"
    if fault.act is Act.FLIP and workers == 1:
        yield "a job of one worker has nobody to compare its state with"
    if not 1 <= workers + RESIZES.get(fault.act, 0) <= lanes:
        yield f"the job has {workers} workers by then, and can have 1 to {lanes}"


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
    moment, present, serving = 0.0, workers, servers
    while True:
        moment += -math.log(1.0 - chance.random()) * mean
        step = math.ceil(moment)
        if step > steps:
            return tuple(faults)
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
        present, serving = _present_after(fault, present, workers), _serving_after(fault, serving, servers)


def _for_server(fault: Fault, servers: int, drawn: float) -> Fault:
    """The same for one of the servers, where there is such a thing for them."""
    phase = None if fault.phase in _NOT_OF_SERVERS else fault.phase
    if fault.act in RESIZES:
        return replace(fault, act=Act.ADD if servers == 1 else fault.act, whom=Whom.SERVER)
    is_for_one = fault.worker is not None and fault.whom is None
    if is_for_one and fault.act in (Act.KILL, Act.STOP, Act.TERM, Act.STARVE, Act.CUT):
        return replace(fault, worker=server_id(int(drawn * servers)), phase=phase)
    return fault


def _present_after(fault: Fault, present: int, workers: int) -> int:
    """How many workers a job of so many has after a fault: who resumes it begins with as many as the job says."""
    if fault.whom is Whom.SERVER:
        return present
    return workers if fault.whom is Whom.LAUNCHER else present + RESIZES.get(fault.act, 0)


def _serving_after(fault: Fault, present: int, servers: int) -> int:
    if fault.whom is Whom.LAUNCHER:
        return servers
    return present + (RESIZES.get(fault.act, 0) if fault.whom is Whom.SERVER else 0)


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


class _Words:
    """The words of a fault, taken one after the other."""

    def __init__(self, text: str) -> None:
        self._text = " ".join(text.split())
        self._rest = self._text.split()

    @property
    def are_over(self) -> bool:
        return not self._rest

    def take(self, what: str) -> str:
        if not self._rest:
            raise self.mistake(f"it ends where {what} is expected")
        return self._rest.pop(0)

    def take_one_of(self, choices: list[str], what: str) -> str:
        listed = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
        word = self.take(f"{listed} ({what})")
        if word.lower() in choices:
            return word.lower()
        meant = nearest(word.lower(), choices)
        hint = f"did you mean {meant[0]}?" if meant else f"expected is {listed} ({what})"
        raise self.mistake(f"`{word}` is not understood; {hint}")

    def take_number(self, what: str, least: int) -> int:
        word = self.take(what)
        if not re.fullmatch(r"[0-9]{1,15}", word) or int(word) < least:
            raise self.mistake(f"`{word}` is not {what}: write a whole number from {least} on")
        return int(word)

    def take_beginning(self) -> int:
        for word in ("from", "step"):
            self.take_one_of([word], "from when on, such as `from step 20`")
        return self.take_number("the number of a step", least=1)

    def take_factor(self, what: str) -> float:
        word = self.take(what)
        match = _FACTOR.fullmatch(word.lower())
        factor = round(float(match[1]), 6) if match else 0.0
        if not 1 < factor <= MOST_SLOW:
            raise self.mistake(f"`{word}` is not {what}: write a number above 1 and up to {MOST_SLOW}, and an x")
        return factor

    def take_time(self, what: str) -> float:
        word = self.take(what)
        try:
            return parse_duration(word)
        except FaultError as error:
            raise self.mistake(error.message) from None

    def refuse_second(self, first: object, what: str) -> None:
        if first is not None:
            raise self.mistake(f"it names two {what}")

    def mistake(self, why: str) -> FaultError:
        return FaultError(f"`{self._text}`: {why}")
