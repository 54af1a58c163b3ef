"""Schedules written by hand: each brings about, in one job, what faults that are drawn rarely do."""

from quorate.core.timing import Timing
from simulation.simulated_faults import ANYBODY, FAILURE_TIMEOUT, Scenario, SimulatedFault
from simulation.task import Course

COURSE = Course(steps=30, lanes=2, evaluate_every=100, save_every=4)

SCHEDULES = {
    # After its first checkpoint worker 0 dies; worker 1, which holds the state, while another is built; the place of
    # worker 1, whose replacement is to restore the checkpoint, is no more before that has come.
    "replaced twice": Scenario(
        COURSE,
        2,
        Timing(FAILURE_TIMEOUT),
        (
            SimulatedFault("kill", 0.0, 0, "checkpoint", 4),
            SimulatedFault("kill", 0.0, ANYBODY, "rebuild", whom="holder", after=0),
            SimulatedFault("resize", 0.0, ANYBODY, "Refill", workers=1, whom="it", after=1),
        ),
    ),
}
