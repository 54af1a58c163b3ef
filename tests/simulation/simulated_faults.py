"""What befalls a simulated job, and when: chosen by chance from one seed, written down before anything happens."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Literal

from quorate.core.digests import derive_seed
from quorate.core.generation import MeshShape, name_of, server_id
from quorate.core.timing import Timing
from simulation.network import Weather
from simulation.task import Course

FAILURE_TIMEOUT = 1.0
KILL, STOP, CUT, LINK, STORM, PAUSE, END = "kill", "stop", "cut", "link", "storm", "pause", "end"
CRASH, TERM, RESIZE, SPOIL, FLIP = "crash", "term", "resize", "spoil", "flip"
SAVE, POWER, HANG, CORRUPT = "save", "power", "hang", "corrupt"
ANYBODY = -1
PHASES = (
    *("build", "register", "wait", "join", "copy", "copy", "copy"),
    *("compute", "exchange", "apply", "evaluation", "checkpoint", "regroup", "complete"),
)

DECISIONS = (
    *("DeclareGeneration", "DeclareGeneration", "Regroup", "EndJob", "EndJob", "WorkerLost", "Refill", "Expel"),
    *("Welcome", "Recall", "RecordEvents", "Dismiss", "Resized", "RelayStop"),
)
"""In the middle of which a coordinator dies: having done only a part of what it has decided."""
MOST_DRIFT = 0.05

_KINDS = (KILL, KILL, KILL, KILL, STOP, STOP, CUT, CUT, STORM, STORM, STORM, PAUSE)
_COUNTS = (0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 8)


@dataclass(frozen=True)
class SimulatedFault:
    """One thing that goes wrong.

    At a time, or when the worker enters a phase for the n-th time from then on; for a coordinator, when it decides on
    such an action. What passes by itself does so after `seconds`. One that is part of a chain waits until the fault of
    the number `after` has befallen somebody, and says `whom` it befalls itself (schedules.py).
    """

    kind: str
    at: float
    worker: int = 0
    phase: str = ""
    nth: int = 1
    seconds: float = 0.0
    others: tuple[str, ...] = ()
    weather: Weather = field(default_factory=Weather)
    workers: int = 0
    servers: int = 0
    whom: str = ""
    after: int | None = None

    def __str__(self) -> str:
        if not self.whom:
            return self._told()
        chained = "" if self.after is None else f" after fault {self.after}"
        return f"{self._told()}; aimed at {self.phase}{chained}, to befall {self.whom}"

    def _told(self) -> str:  # noqa: C901 (one sentence for each kind)
        when = f"from {self.at:.3f} s on" if self.phase else f"at {self.at:.3f} s"
        where = f", the {self.nth}. time in {self.phase}" if self.phase else ""
        who = "anybody" if self.worker == ANYBODY else name_of(self.worker)
        match self.kind:
            case "kill":
                return f"kill {who} {when}{where}"
            case "stop":
                return f"stop {who} {when}{where}, for {self.seconds:.3f} s"
            case "cut":
                return f"cut {who} off from {', '.join(self.others)} {when}, for {self.seconds:.3f} s"
            case "link":
                span = f"for {self.seconds:.3f} s" if math.isfinite(self.seconds) else "for ever"
                return f"the link between {who} and {self.others[0]} is cut {when}, {span}"
            case "storm":
                return f"storm {when}, for {self.seconds:.3f} s: {self.weather}"
            case "pause":
                return f"the coordinator is held up {when}, for {self.seconds:.3f} s"
            case "crash":
                moment = f", at the {self.nth}. {self.phase}" if self.phase else ""
                return f"crash of the coordinator {when}{moment}; the next comes after {self.seconds:.3f} s"
            case "term":
                return f"term {who} {when}{where}"
            case "flip":
                return f"flip a bit of {who} {when}{where}"
            case "corrupt":
                return f"corrupt what {who} computes {when}{where}"
            case "spoil":
                return f"spoil the newest checkpoint {when}{where}"
            case "resize":
                what = f"{self.servers} servers" if self.servers else f"{self.workers} workers"
                return f"resize to {what} {when}"
            case "save":
                return f"save, which somebody asks for {when}{where}"
            case "power":
                return f"power of the host of all workers is cut {when}{where}"
            case "hang":
                return f"hang of {who} {when}{where}"
            case _:
                return f"the job is asked to stop {when}"


@dataclass(frozen=True)
class Scenario:
    """A job, and all that befalls it.

    `shares_memory`: its workers run on one host; otherwise they form a ring. `drift`: by how much at most the clock of
    a host is faster or slower than the true one. `poison`: the step and lane whose samples kill every worker that takes
    them. `slow`: the worker that is several times slower than the others.
    """

    course: Course
    workers: int
    timing: Timing
    faults: tuple[SimulatedFault, ...]
    shares_memory: bool = False
    spares: int = 0
    drift: float = 0.0
    keep: int = 2
    when_busy: Literal["wait", "skip"] = "skip"
    min_workers: int = 1
    step_timeout: float | None = None
    balance: str = "even"
    poison: tuple[int, int] | None = None
    slow: int | None = None
    servers: int = 0
    replicas: int = 1
    mesh: MeshShape | None = None

    @property
    def is_audited(self) -> bool:
        """Whether somebody computes wrongly, and lanes are computed twice."""
        return self.mesh is None and any(fault.kind == CORRUPT for fault in self.faults)

    @property
    def calm_from(self) -> float:
        """When the last fault is over that ever is, unless it waits for a phase."""
        ends = (fault.at + fault.seconds for fault in self.faults if math.isfinite(fault.seconds))
        return max(ends, default=0.0)


def drawn(seed: int) -> Scenario:
    """A scenario in which each fault is drawn for itself."""
    chance = random.Random(derive_seed(seed, "scenario"))
    workers = chance.choice((1, 2, 2, 3, 3, 4))
    lanes = chance.randint(workers, workers + 4)
    steps = chance.randint(6, chance.choice((12, 24, 24, 60)))
    course = Course(steps, lanes, evaluate_every=chance.choice((3, 5, 100)), save_every=chance.choice((4, 7, 100)))
    # About as long as the undisturbed job takes, so that most faults fall into it.
    length = 0.4 + steps * (0.012 * lanes / workers + 0.01)
    # Often one misfortune brings another: then they all begin within the time that a recovery takes.
    begin, end = (0.0, 1.2 * length) if chance.random() < 0.5 else _burst(chance, length)
    faults = [_fault(chance, workers, chance.uniform(begin, end)) for _ in range(chance.choice(_COUNTS))]
    if chance.random() < 0.1:
        at = chance.uniform(0.0, length)
        faults.append(SimulatedFault(END, at))
        if chance.random() < 0.3:
            faults.append(SimulatedFault(KILL, at, ANYBODY, "complete", chance.choice((1, 2))))
    lines = random.Random(derive_seed(seed, "lines"))
    shares_memory = lines.random() < 0.5
    if workers > 1 and lines.random() < 0.15:
        # Long enough for whoever is left out to be tried again, and again.
        course = replace(course, steps=lines.randint(60, 240))
        faults.append(_cut_link(lines, workers, lines.uniform(0.0, length)))
    elif shares_memory and lines.random() < 0.1:
        course = replace(course, steps=lines.randint(60, 120))
        faults.append(_stop_writer(lines, workers, lines.uniform(0.2, length)))
    powers = random.Random(derive_seed(seed, "powers"))
    faults += _crashes(powers, faults, length) + _changes(powers, course, workers, length)
    in_order = tuple(sorted(faults, key=lambda fault: fault.at))
    drift, spares = powers.choice((0.0, 0.01, MOST_DRIFT)), powers.choice((0, 0, 0, 1))
    return Scenario(course, workers, Timing(FAILURE_TIMEOUT), in_order, shares_memory, spares, drift)


def with_manners(whole: Scenario, seed: int) -> Scenario:
    """With what a job may say of how it runs, and what goes with it: requests to save, hangs, cuts of power, poison."""
    chance = random.Random(derive_seed(seed, "manners"))
    course, workers, faults = whole.course, whole.workers, list(whole.faults)
    length = 0.4 + course.steps * (0.012 * course.lanes / workers + 0.01)
    faults += [SimulatedFault(SAVE, chance.uniform(0.2, length)) for _ in range(chance.choice((0, 0, 0, 1, 3)))]
    if chance.random() < 0.1:
        faults.append(SimulatedFault(POWER, chance.uniform(0.2, length), ANYBODY, "checkpoint", chance.randint(2, 9)))
    step_timeout = FAILURE_TIMEOUT * chance.choice((3.0, 6.0)) if chance.random() < 0.15 else None
    if step_timeout is not None:
        phase = chance.choice(("compute", "compute", "apply", "checkpoint"))
        faults.append(SimulatedFault(HANG, chance.uniform(0.2, length), ANYBODY, phase, chance.randint(1, 9)))
    poison = (chance.randint(1, course.steps), chance.randrange(course.lanes)) if chance.random() < 0.03 else None
    is_balanced = workers > 1 and chance.random() < 0.08
    if is_balanced:
        course = replace(course, steps=chance.randint(60, 120))
    return replace(
        whole,
        course=course,
        faults=tuple(faults),
        keep=chance.choice((1, 1, 2, 3)),
        when_busy=chance.choice(("wait", "skip", "skip")),
        min_workers=chance.choice((1, 1, 1, workers, max(1, workers - 1))),
        step_timeout=step_timeout,
        balance="speed" if is_balanced else "even",
        poison=poison if poison is not None and poison[0] <= course.steps else None,
        slow=chance.randrange(workers) if is_balanced else None,
    )


def with_corruption(whole: Scenario, seed: int) -> Scenario:
    """In some jobs somebody computes wrongly from some moment on; in these, lanes are audited."""
    chance = random.Random(derive_seed(seed, "corruption"))
    if whole.workers == 1 or chance.random() < 0.8:
        return whole
    length = 0.4 + whole.course.steps * (0.012 * whole.course.lanes / whole.workers + 0.01)
    fault = SimulatedFault(CORRUPT, chance.uniform(0.2, length), chance.randrange(whole.workers))
    return replace(whole, faults=(*whole.faults, fault))


def with_servers(whole: Scenario, seed: int, servers: int) -> Scenario:
    """With so many servers beside the workers: half of what befalls one of the processes befalls one of them."""
    if not servers:
        return whole
    chance = random.Random(derive_seed(seed, "servers", servers))
    faults = tuple(_for_servers(chance, fault, servers) for fault in whole.faults)
    return replace(whole, servers=servers, replicas=chance.choice((1, 2, 2, 2, 3)), faults=faults)


def with_mesh(whole: Scenario, seed: int) -> Scenario:
    """The same for a sharded gang of as many workers, which has no spares and shares no lanes by speed."""
    chance = random.Random(derive_seed(seed, "mesh"))
    sizes = range(1, whole.workers + 1)
    shapes = [MeshShape(r, s, t) for r in sizes for s in sizes for t in sizes if r * s * t == whole.workers]
    mesh = chance.choice(shapes)
    course = replace(whole.course, lanes=-(-whole.course.lanes // mesh.groups) * mesh.groups)
    return replace(whole, mesh=mesh, course=course, spares=0, balance="even", slow=None)


def _for_servers(chance: random.Random, fault: SimulatedFault, servers: int) -> SimulatedFault:
    server = server_id(chance.randrange(servers))
    if chance.random() < 0.5:
        return fault
    match fault.kind:
        case "kill" | "stop" | "term" | "hang" if fault.worker != ANYBODY:
            return replace(fault, worker=server)
        case "cut":
            return replace(fault, others=(*fault.others, name_of(server)))
        case "link":
            return replace(fault, others=(name_of(server),))
        case "resize":
            return replace(fault, workers=0, servers=chance.randint(1, 3))
    return fault


def _crashes(chance: random.Random, others: list[SimulatedFault], length: float) -> list[SimulatedFault]:
    """Of the coordinator: alone, in a row, and together with what befalls the workers."""
    if chance.random() < 0.4:
        return []
    crashes = []
    at = chance.choice(others).at if others and chance.random() < 0.5 else chance.uniform(0.0, 1.2 * length)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        phase = chance.choice(DECISIONS) if chance.random() < 0.6 else ""
        away = _away(chance)
        crashes.append(SimulatedFault(CRASH, at, phase=phase, nth=chance.choice((1, 1, 1, 2, 3)), seconds=away))
        at += away + chance.choice((0.01, 0.1, 1.0)) * chance.random()
    return crashes


def _changes(chance: random.Random, course: Course, workers: int, length: float) -> list[SimulatedFault]:
    """Workers that are asked to leave, and other numbers of them."""
    changes = []
    if chance.random() < 0.25:
        for _ in range(chance.choice((1, 1, 2, workers))):
            who = chance.randrange(workers)
            changes.append(SimulatedFault(TERM, chance.uniform(0.0, length), *_moment(chance, who)))
    if chance.random() < 0.25:
        for _ in range(chance.choice((1, 2, 3))):
            wanted = chance.randint(1, course.lanes)
            changes.append(SimulatedFault(RESIZE, chance.uniform(0.0, length), workers=wanted))
    return changes


def _burst(chance: random.Random, length: float) -> tuple[float, float]:
    begin = chance.uniform(0.0, length)
    return begin, begin + chance.choice((0.1, 0.4, 1.5))


def _cut_link(chance: random.Random, workers: int, at: float) -> SimulatedFault:
    """Two workers lose each other, and nobody else does."""
    one, other = chance.sample(range(workers), 2)
    seconds = FAILURE_TIMEOUT * chance.choice((1.5, 5.0, 15.0, math.inf))
    return SimulatedFault(LINK, at, one, seconds=seconds, others=(f"worker {other}",))


def _stop_writer(chance: random.Random, workers: int, at: float) -> SimulatedFault:
    """One is stopped while it writes its lanes, and wakes up when it has been given up for lost."""
    return SimulatedFault(
        STOP, at, chance.randrange(workers), "compute", seconds=FAILURE_TIMEOUT * chance.uniform(1.1, 2.0)
    )


def _fault(chance: random.Random, workers: int, at: float) -> SimulatedFault:
    kind, worker = chance.choice(_KINDS), chance.randrange(workers)
    long = _long(chance)
    match kind:
        case "kill":
            return SimulatedFault(kind, at, *_moment(chance, worker))
        case "stop":
            return SimulatedFault(kind, at, *_moment(chance, worker), seconds=long)
        case "cut":
            return SimulatedFault(kind, at, worker, seconds=long, others=_others(chance, worker, workers))
        case "storm":
            return _storm(chance, at)
        case _:
            return SimulatedFault(kind, at, seconds=min(long, 1.2 * FAILURE_TIMEOUT))


def draw(chance: random.Random, kind: str, worker: int, workers: int, lanes: int) -> SimulatedFault:
    """A fault of a kind, for whoever says when it befalls whom."""
    match kind:
        case "stop":
            return SimulatedFault(kind, 0.0, worker, seconds=_long(chance))
        case "cut":
            return SimulatedFault(kind, 0.0, worker, seconds=_long(chance), others=_others(chance, worker, workers))
        case "link":
            return _cut_link(chance, workers, 0.0)
        case "storm":
            return _storm(chance, 0.0)
        case "pause":
            return SimulatedFault(kind, 0.0, seconds=min(_long(chance), 1.2 * FAILURE_TIMEOUT))
        case "crash":
            return SimulatedFault(kind, 0.0, seconds=_away(chance))
        case "resize":
            return SimulatedFault(
                kind, 0.0, workers=chance.choice((1, 1, 1, max(1, workers - 1), chance.randint(1, lanes)))
            )
        case _:
            return SimulatedFault(kind, 0.0, worker)


def _long(chance: random.Random) -> float:
    return FAILURE_TIMEOUT * chance.choice((0.1, 0.5, 0.9, 1.0, 1.1, 2.0)) * chance.uniform(0.8, 1.2)


def _away(chance: random.Random) -> float:
    """How long there is no coordinator."""
    return FAILURE_TIMEOUT * chance.choice((0.01, 0.01, 0.02, 0.1, 0.4, 0.8, 1.2, 2.5)) * chance.uniform(0.8, 1.2)


def _storm(chance: random.Random, at: float) -> SimulatedFault:
    weather = Weather(
        loss=chance.choice((0.0, 0.02, 0.1)),
        duplication=chance.choice((0.0, 0.1, 0.3)),
        lateness=chance.choice((0.1, 0.3)),
        latest=chance.choice((0.02, 0.1, 0.5)),
    )
    return SimulatedFault(STORM, at, seconds=chance.uniform(0.2, 2.0) * FAILURE_TIMEOUT, weather=weather)


def _moment(chance: random.Random, worker: int) -> tuple[int, str, int]:
    """Who, in which phase, and for which time it enters it.

    A third of the time it is any moment; else a phase, since many are too short to be hit by chance, and then often
    of whoever comes to it first.
    """
    if chance.random() < 0.33:
        return worker, "", 1
    who = ANYBODY if chance.random() < 0.5 else worker
    return who, chance.choice(PHASES), chance.choice((1, 1, 1, 2, 3))


def _others(chance: random.Random, worker: int, workers: int) -> tuple[str, ...]:
    peers = tuple(f"worker {peer}" for peer in range(workers) if peer != worker)
    choices: list[tuple[str, ...]] = [("coordinator",), ("coordinator", *peers)]
    if peers:
        choices += [peers, (chance.choice(peers),)]
    return chance.choice(choices)
