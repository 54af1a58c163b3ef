"""Whole jobs with parameter servers under virtual time: no block is lost that need not be, and mistakes are shown."""

from collections import Counter
from dataclasses import replace

import pytest

from simulation.mutants import WITH_SERVERS, Mutant
from simulation.schedules import scenario
from simulation.simulated_faults import SimulatedFault
from simulation.simulation import Simulation, Verdict

SEEDS = range(2000, 2012)
ENOUGH = 300
"""Of seeds with two or three servers it takes no more to show a mistake."""


@pytest.mark.parametrize(
    "servers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_no_invariant_breaks_whatever_befalls_workers_and_servers(servers: int) -> None:
    verdicts = [Simulation(seed, servers=servers, traces=True).run() for seed in SEEDS]
    assert [verdict for verdict in verdicts if verdict.broken] == []
    endings = Counter(verdict.ending for verdict in verdicts)
    assert endings["complete"] > 0.6 * len(SEEDS)
    # What was simulated is not just calm weather.
    dead = [line for verdict in verdicts for line in verdict.trace if "server " in line and " dies in " in line]
    assert len(dead) > 0.3 * len(SEEDS)


def calm_but_for(*faults: SimulatedFault, servers: int, replicas: int, seed: int = 4) -> Verdict:
    calm = replace(scenario(seed, servers), faults=faults, poison=None, balance="even", spares=0, replicas=replicas)
    calm = replace(calm, course=replace(calm.course, steps=40, save_every=8), step_timeout=None)
    return Simulation(seed, given=calm, traces=True).run()


def told(verdict: Verdict, what: str) -> bool:
    return any(what in line for line in verdict.trace)


def test_undisturbed_it_needs_one_generation() -> None:
    verdict = calm_but_for(servers=2, replicas=2)
    assert (verdict.broken, verdict.ending, verdict.generations) == (None, "complete", 1)


def test_with_replicas_a_killed_server_costs_no_step() -> None:
    verdict = calm_but_for(SimulatedFault("kill", 0.8, 1_000_001), servers=3, replicas=2)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "server 1 (pid")
    assert not told(verdict, "All go back to the newest checkpoint")


def test_without_replicas_it_costs_the_steps_since_the_checkpoint() -> None:
    verdict = calm_but_for(SimulatedFault("kill", 0.8, 1_000_001), servers=3, replicas=1)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "All go back to the newest checkpoint")


def test_a_server_that_is_asked_to_leave_costs_no_step_without_replicas_either() -> None:
    verdict = calm_but_for(SimulatedFault("term", 0.8, 1_000_001), servers=2, replicas=1)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "server 1 (pid")
    assert told(verdict, "has left")
    assert not told(verdict, "All go back to the newest checkpoint")


def test_fewer_servers_and_more_again_lose_nothing() -> None:
    changes = [SimulatedFault("resize", 0.6 + 0.3 * n, servers=servers) for n, servers in enumerate((1, 3, 2))]
    verdict = calm_but_for(*changes, servers=3, replicas=1)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "and 1 of 1 servers at step")
    assert told(verdict, "and 3 of 3 servers at step")
    assert not told(verdict, "All go back to the newest checkpoint")


LOOKED_AT_FIRST = (9, 39, 120)
"""Seeds that have shown mistakes; where they do not any more, all are looked at."""


@pytest.mark.long
@pytest.mark.parametrize("mutant", WITH_SERVERS, ids=lambda mutant: mutant.name)
def test_each_mistake_is_shown(mutant: Mutant) -> None:
    for seed in (*LOOKED_AT_FIRST, *range(ENOUGH)):
        if Simulation(seed, mutant, servers=2 + seed % 2).run().broken is not None:
            return
    pytest.fail(f"'{mutant.name}' is not shown by {ENOUGH} seeds")
