"""Which scenario a seed has, and which pairs of events and faults the scenarios so far have covered.

Even seeds draw their faults, each for itself. Odd ones aim: a chain of faults, each of which waits for the one before
it and then for an event, so that the second comes while the job recovers from the first. What kills a job in silence
takes two or three faults within the tenth of a second in which somebody is built, registers or copies, and faults that
are drawn one by one do not line up like that.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from quorate.core.digests import derive_seed
from quorate.core.timing import Timing
from simulation.simulated_faults import (
    ANYBODY,
    CRASH,
    CUT,
    END,
    FAILURE_TIMEOUT,
    FLIP,
    HANG,
    KILL,
    LINK,
    MOST_DRIFT,
    PAUSE,
    POWER,
    RESIZE,
    SAVE,
    SPOIL,
    STOP,
    STORM,
    TERM,
    Scenario,
    SimulatedFault,
    draw,
    drawn,
    with_corruption,
    with_manners,
    with_servers,
)
from simulation.task import Course

REBUILD = "rebuild"
"""The phase in which a process is built after the first generation, while the others train or wait for it."""
PHASES = (
    *("build", REBUILD, "register", "wait", "join", "copy", "compute", "exchange", "apply", "evaluation"),
    *("checkpoint", "regroup", "complete"),
)
DECISIONS = (
    *("DeclareGeneration", "Regroup", "WorkerLost", "Refill", "Expel", "Welcome", "Recall", "Dismiss"),
    *("Resized", "RelayStop"),
)
RECENT = 0.05
"""Seconds for which a decision of the coordinator counts as being carried out."""
FAULTS = (KILL, STOP, CUT, LINK, STORM, PAUSE, CRASH, TERM, RESIZE, SPOIL, FLIP, SAVE, POWER, HANG, END)

Pair = tuple[str, str]
PAIRS = frozenset((event, fault) for event in (*PHASES, *DECISIONS) for fault in FAULTS)
"""What happens in a job, and what goes wrong while it does."""

IT, HOLDER, NEWCOMER, OTHER, ALL = "it", "holder", "newcomer", "other", "all"
"""Whom an aimed fault befalls: who has met the event; who is furthest beside it; who was started last; anybody else;
everybody, as when the process that forks them dies."""

_BEGINNINGS = ("checkpoint", "checkpoint", "compute", "exchange", "apply")
_RECOVERY = (
    *(REBUILD, "register", "wait", "join", "copy", "regroup", "checkpoint", "compute", "exchange", "apply"),
    *("evaluation", "complete", *DECISIONS),
)
_WINDOWS = (REBUILD, "copy", "register", "join", "Refill", "DeclareGeneration", "WorkerLost", "Welcome")
"""Where a second fault hurts most: while the job recovers from the first."""
_OTHER_FAULTS = (*(RESIZE,) * 5, *(CRASH,) * 3, *(FLIP,) * 3, TERM, TERM, SPOIL, STOP, CUT, LINK, STORM, PAUSE, END)
_CANDIDATES = 4


def scenario(seed: int, servers: int = 0) -> Scenario:
    """The scenario of a seed, in a job with so many servers."""
    whole = with_manners(aimed(seed) if seed % 2 else drawn(seed), seed)
    return with_servers(with_corruption(whole, seed), seed, servers)


def aimed(seed: int) -> Scenario:
    """A job that saves often, and a chain of faults."""
    chance = random.Random(derive_seed(seed, "aims"))
    workers = chance.choice((2, 2, 2, 3, 3, 4))
    course = Course(
        steps=chance.randint(12, 30),
        lanes=chance.randint(workers, workers + 2),
        evaluate_every=chance.choice((3, 5, 100)),
        save_every=chance.choice((2, 2, 3, 3, 4, 4, 4, 100)),
    )
    # Few kinds of each in one chain: what takes a certain two of them in a row is drawn far more often like that.
    events = [*chance.sample(_WINDOWS, 2), *chance.sample(_RECOVERY, chance.choice((0, 1, 2)))]
    faults = [KILL, chance.choice(_OTHER_FAULTS), *chance.choices(_OTHER_FAULTS, k=chance.choice((0, 0, 1)))]
    first = KILL if chance.random() < 0.8 else chance.choice(faults)
    beginning = chance.choice(_BEGINNINGS)
    chain = [
        replace(_aim(chance, beginning, first, workers, course.lanes), nth=_late(chance, beginning, workers, course))
    ]
    for number in range(chance.choice((1, 2, 2, 3, 3, 4))):
        chain.append(_aim(chance, chance.choice(events), chance.choice(faults), workers, course.lanes, number))
    return Scenario(
        course,
        workers,
        Timing(FAILURE_TIMEOUT),
        tuple(chain),
        shares_memory=chance.random() < 0.5,
        spares=chance.choice((0, 0, 0, 1)),
        drift=chance.choice((0.0, 0.01, MOST_DRIFT)),
    )


def _late(chance: random.Random, event: str, workers: int, course: Course) -> int:
    """For which time it happens when there is a checkpoint already, mostly."""
    if event == "checkpoint":
        return chance.randint(workers + 2, 3 * workers + 3)  # whoever writes it comes there twice
    each = course.lanes if event == "compute" else workers
    return each * chance.randint(4, 10) + chance.randrange(each)


def _aim(
    chance: random.Random, event: str, kind: str, workers: int, lanes: int, after: int | None = None
) -> SimulatedFault:
    """A fault of a kind when an event is met; not before the fault of the number `after` has befallen."""
    worker = chance.randrange(workers)
    plain = draw(chance, kind, worker, workers, lanes)
    nth = chance.choice((1, 1, 1, 2))
    return SimulatedFault(
        kind,
        0.0,
        ANYBODY,
        event,
        nth,
        plain.seconds,
        plain.others,
        plain.weather,
        plain.workers,
        0,
        chance.choice((IT, HOLDER, HOLDER, HOLDER, NEWCOMER, OTHER, ALL)),
        after,
    )


@dataclass
class Coverage:
    """The pairs that have been seen. Whoever chooses the next seed prefers those that have not."""

    seen: set[Pair] = field(default_factory=set)

    def add(self, pairs: Iterable[Pair]) -> None:
        """These have been seen once more."""
        self.seen.update(PAIRS.intersection(pairs))

    @property
    def missing(self) -> list[Pair]:
        """What has not been seen, in order."""
        return sorted(PAIRS - self.seen)

    def seeds(self, first: int, count: int) -> Iterator[int]:
        """So many seeds to simulate: in turn the next even one, and of the next few odd ones the one that aims best."""
        even, odd = first + first % 2, first + 1 - first % 2
        for number in range(count):
            if number % 2 == 0:
                yield even
                even += 2
            else:
                candidates = range(odd, odd + 2 * _CANDIDATES, 2)
                odd += 2 * _CANDIDATES
                yield max(candidates, key=lambda seed: (len(self._new_in(aimed(seed))), -seed))

    def _new_in(self, whole: Scenario) -> set[Pair]:
        return {(fault.phase, fault.kind) for fault in whole.faults} & PAIRS - self.seen
