"""Whole jobs of sharded gangs under virtual time: no step is done again unless a part of the state is gone."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from quorate.coordinator.states import Enrolled, Members
from quorate.core.generation import MeshShape
from simulation.schedules import scenario
from simulation.simulated_faults import SimulatedFault
from simulation.simulation import Simulation, Verdict

SEEDS = range(3000, 3016)
LOOKED_AT_FIRST = (74,)
"""Seeds that have shown a mistake; where they do not any more, others are looked at."""
REPLICATED, SHARDED = MeshShape(replicate=2, shard=2), MeshShape(shard=2, tensor=2)


def test_no_invariant_breaks_whatever_befalls_a_mesh() -> None:
    verdicts = [Simulation(seed, is_meshed=True, traces=True).run() for seed in SEEDS]
    assert [verdict for verdict in verdicts if verdict.broken] == []
    endings = Counter(verdict.ending for verdict in verdicts)
    assert endings["complete"] > 0.6 * len(SEEDS)
    # What was simulated is not just calm weather.
    assert any(told(verdict, "from a checkpoint") for verdict in verdicts)
    assert any(told(verdict, "has taken up") and told(verdict, "from worker") for verdict in verdicts)


def calm_but_for(*faults: SimulatedFault, mesh: MeshShape, save_every: int = 8, seed: int = 4) -> Verdict:
    calm = replace(scenario(seed), faults=faults, poison=None, balance="even", spares=0, slow=None, step_timeout=None)
    course = replace(calm.course, steps=40, lanes=4, save_every=save_every)
    return Simulation(seed, given=replace(calm, mesh=mesh, workers=mesh.size, course=course), traces=True).run()


def told(verdict: Verdict, what: str) -> bool:
    return any(what in line for line in verdict.trace)


@pytest.mark.parametrize("mesh", [REPLICATED, SHARDED], ids=str)
def test_undisturbed_it_needs_one_generation(mesh: MeshShape) -> None:
    verdict = calm_but_for(mesh=mesh)
    assert (verdict.broken, verdict.ending, verdict.generations) == (None, "complete", 1)
    assert verdict.steps >= 40 * mesh.size


def test_with_replicas_a_killed_worker_costs_no_step() -> None:
    verdict = calm_but_for(SimulatedFault("kill", 0.8, 3, "compute"), mesh=REPLICATED)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "worker 3 has taken up step")
    assert told(verdict, "from worker 1")
    assert not told(verdict, "RolledBack")


@pytest.mark.parametrize(
    ("save_every", "said", "started"), [(8, "from a checkpoint", 5), (100, "it restarts at step 1", 8)]
)
def test_without_replicas_it_costs_the_steps_since_the_checkpoint(save_every: int, said: str, started: int) -> None:
    verdict = calm_but_for(SimulatedFault("kill", 0.8, 3, "exchange"), mesh=SHARDED, save_every=save_every)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, said)
    assert told(verdict, "RolledBack")
    assert verdict.generations == 2
    # Survivors keep their processes, unless they would have to go back to what nobody keeps.
    assert sum("is started as pid" in line for line in verdict.trace) == started


def test_a_worker_that_is_asked_to_leave_costs_no_step_without_replicas_either() -> None:
    verdict = calm_but_for(SimulatedFault("term", 0.8, 3), mesh=SHARDED)
    assert (verdict.broken, verdict.ending) == (None, "complete")
    assert told(verdict, "has left")
    assert not told(verdict, "has taken up"), "all stand where the replacement does"


def holds_any(members: Members, some: Iterable[Enrolled]) -> bool:
    return any(known.has_trained for known in some)


def holds_at_any_cursor(members: Members, some: Iterable[Enrolled]) -> bool:
    assert members.settings.mesh is not None
    parts = {members.settings.part(known.worker) for known in some if known.has_trained}
    return len(parts) == members.settings.mesh.parts


@pytest.mark.parametrize("mistake", [holds_any, holds_at_any_cursor])
def test_a_wrong_belief_about_what_is_held_is_shown(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "is_held_by", mistake)

    def breaks(seed: int) -> bool:
        try:
            return Simulation(seed, is_meshed=True).run().broken is not None
        except ValueError:  # there is no cursor to go on from
            return True

    assert any(breaks(seed) for seed in (*LOOKED_AT_FIRST, *range(60)))
