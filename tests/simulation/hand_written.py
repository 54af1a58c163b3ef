"""Schedules written by hand: each brings about, in one job, what faults that are drawn rarely do."""

import math

from quorate.core.timing import Timing
from simulation.simulated_faults import ANYBODY, FAILURE_TIMEOUT, Scenario, SimulatedFault
from simulation.task import Course

SEEDS = (1, 2)
"""With which each is simulated."""

_TIMING = Timing(FAILURE_TIMEOUT)
_SHORT = Course(steps=30, lanes=2, evaluate_every=100, save_every=4)
_LONG = Course(steps=120, lanes=3, evaluate_every=1000, save_every=4)
_CUT = SimulatedFault("link", 0.5, 0, seconds=math.inf, others=("worker 1",))
_OTHERS_DIE = (SimulatedFault("kill", 3.5, 0), SimulatedFault("kill", 3.5, 2))

SCHEDULES = {
    # After its first checkpoint worker 0 dies; worker 1, which holds the state, while another is built; the place of
    # worker 1, whose replacement is to restore the checkpoint, is no more before that has come.
    "replaced twice": Scenario(
        _SHORT,
        2,
        _TIMING,
        (
            SimulatedFault("kill", 0.0, 0, "checkpoint", 4),
            SimulatedFault("kill", 0.0, ANYBODY, "rebuild", whom="holder", after=0),
            SimulatedFault("resize", 0.0, ANYBODY, "Refill", workers=1, whom="it", after=1),
        ),
    ),
    # Three on a ring, and a link that stays cut: worker 1 is left out. What it holds is old when the others die.
    "left out and alone": Scenario(_LONG, 3, _TIMING, (_CUT, *_OTHERS_DIE)),
    # The same, and the coordinator dies as well: the next one goes by what worker 1 says that it holds.
    "left out and alone with a new coordinator": Scenario(
        _LONG, 3, _TIMING, (_CUT, SimulatedFault("crash", 0.0, ANYBODY, "Refill", 1, 0.3), *_OTHERS_DIE)
    ),
}
