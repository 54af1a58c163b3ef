"""What befalls a simulated job, and when: chosen by chance from one seed, written down before anything happens."""

import random
from dataclasses import dataclass, field

from quorate.core.seeds import derive_seed
from quorate.core.timing import Timing
from quorate.testing.network import Weather
from quorate.testing.task import Course

FAILURE_TIMEOUT = 1.0
KILL, STOP, CUT, STORM, PAUSE, END = "kill", "stop", "cut", "storm", "pause", "end"
ANYBODY = -1
PHASES = (
    *("build", "register", "wait", "join", "copy", "copy", "copy"),
    *("compute", "exchange", "apply", "evaluation", "checkpoint", "regroup", "complete"),
)

_KINDS = (KILL, KILL, KILL, KILL, STOP, STOP, CUT, CUT, STORM, STORM, STORM, PAUSE)
_COUNTS = (0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 8)


@dataclass(frozen=True)
class Mishap:
    """One thing that goes wrong.

    At a time, or when the worker enters a phase for the n-th time from then on. What passes by itself does so after
    `seconds`.
    """

    kind: str
    at: float
    worker: int = 0
    phase: str = ""
    nth: int = 1
    seconds: float = 0.0
    others: tuple[str, ...] = ()
    weather: Weather = field(default_factory=Weather)

    def __str__(self) -> str:
        when = f"from {self.at:.3f} s on" if self.phase else f"at {self.at:.3f} s"
        where = f", the {self.nth}. time in {self.phase}" if self.phase else ""
        who = "anybody" if self.worker == ANYBODY else f"worker {self.worker}"
        match self.kind:
            case "kill":
                return f"kill {who} {when}{where}"
            case "stop":
                return f"stop {who} {when}{where}, for {self.seconds:.3f} s"
            case "cut":
                return f"cut worker {self.worker} off from {', '.join(self.others)} {when}, for {self.seconds:.3f} s"
            case "storm":
                return f"storm {when}, for {self.seconds:.3f} s: {self.weather}"
            case "pause":
                return f"the coordinator is held up {when}, for {self.seconds:.3f} s"
            case _:
                return f"the job is asked to stop {when}"


@dataclass(frozen=True)
class Scenario:
    """A job, and all that befalls it."""

    course: Course
    workers: int
    timing: Timing
    mishaps: tuple[Mishap, ...]

    @property
    def calm_from(self) -> float:
        """When the last mishap is over, unless it waits for a phase."""
        return max((mishap.at + mishap.seconds for mishap in self.mishaps), default=0.0)


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(derive_seed(seed, "scenario"))
    workers = chance.choice((1, 2, 2, 3, 3, 4))
    lanes = chance.randint(workers, workers + 4)
    steps = chance.randint(6, chance.choice((12, 24, 24, 60)))
    course = Course(steps, lanes, evaluate_every=chance.choice((3, 5, 100)), save_every=chance.choice((4, 7, 100)))
    # About as long as the undisturbed job takes, so that most mishaps fall into it.
    length = 0.4 + steps * (0.012 * lanes / workers + 0.01)
    # Often one misfortune brings another: then they all begin within the time that a recovery takes.
    begin, end = (0.0, 1.2 * length) if chance.random() < 0.5 else _burst(chance, length)
    mishaps = [_mishap(chance, workers, chance.uniform(begin, end)) for _ in range(chance.choice(_COUNTS))]
    if chance.random() < 0.1:
        at = chance.uniform(0.0, length)
        mishaps.append(Mishap(END, at))
        if chance.random() < 0.3:
            mishaps.append(Mishap(KILL, at, ANYBODY, "complete", chance.choice((1, 2))))
    return Scenario(course, workers, Timing(FAILURE_TIMEOUT), tuple(sorted(mishaps, key=lambda mishap: mishap.at)))


def _burst(chance: random.Random, length: float) -> tuple[float, float]:
    begin = chance.uniform(0.0, length)
    return begin, begin + chance.choice((0.1, 0.4, 1.5))


def _mishap(chance: random.Random, workers: int, at: float) -> Mishap:
    kind, worker = chance.choice(_KINDS), chance.randrange(workers)
    long = FAILURE_TIMEOUT * chance.choice((0.1, 0.5, 0.9, 1.0, 1.1, 2.0)) * chance.uniform(0.8, 1.2)
    match kind:
        case "kill":
            return Mishap(kind, at, *_moment(chance, worker))
        case "stop":
            return Mishap(kind, at, *_moment(chance, worker), seconds=long)
        case "cut":
            return Mishap(kind, at, worker, seconds=long, others=_others(chance, worker, workers))
        case "storm":
            weather = Weather(
                loss=chance.choice((0.0, 0.02, 0.1)),
                duplication=chance.choice((0.0, 0.1, 0.3)),
                lateness=chance.choice((0.1, 0.3)),
                latest=chance.choice((0.02, 0.1, 0.5)),
            )
            return Mishap(kind, at, seconds=chance.uniform(0.2, 2.0) * FAILURE_TIMEOUT, weather=weather)
        case _:
            return Mishap(kind, at, seconds=min(long, 1.2 * FAILURE_TIMEOUT))


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
