"""The parts of the simulator: its clock, its network, and the chain of digests in which every mistake stays visible."""

import random
from pathlib import Path

import pytest

from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.tensor_file import TensorFile
from quorate.core.errors import AttemptGone, QuorateError
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member
from quorate.task.progress import Progress
from simulation.clock import HostClock, Process, VirtualClock
from simulation.invariants import InvariantBroken, Referee
from simulation.network import Network, Weather
from simulation.simulated_disk import HeldLayout, SimulatedDisk
from simulation.simulated_memory import SimulatedMemory
from simulation.task import BEGINNING, Course, Holding, apply_step, contribute, undisturbed

COURSE = Course(steps=4, lanes=3, evaluate_every=2, save_every=4)
FIRST = GenerationId(1, 1)


def run(clock: VirtualClock) -> None:
    while clock.advance():
        pass


def test_deeds_are_done_in_the_order_of_their_times_and_then_of_their_planning() -> None:
    clock, done = VirtualClock(), list[str]()
    for seconds, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.after(seconds, lambda name=name: done.append(f"{name} at {clock.now}"))  # type: ignore[misc]
    run(clock)
    assert done == ["first at 1.0", "second at 1.0", "late at 2.0"]


def test_a_clock_that_runs_fast_wakes_early_and_has_its_own_beginning() -> None:
    true, woken = VirtualClock(), list[float]()
    fast = HostClock(true, rate=1.25, offset=100.0)
    fast.after(1.0, lambda: woken.append(fast.time()))
    run(true)
    assert (true.now, fast.now, woken) == (0.8, 101.0, [101.0])


def test_a_stopped_process_catches_up_and_a_dead_one_does_not() -> None:
    clock, done = VirtualClock(), list[str]()
    stopped, dead = Process(clock, "a"), Process(clock, "b")
    for process in (stopped, dead):
        for seconds in (1.0, 2.0):
            process.after(seconds, lambda place=process.place: done.append(f"{place} at {clock.now}"))  # type: ignore[misc]
        process.stop()
    clock.after(5.0, stopped.go_on)
    clock.after(1.5, dead.die)
    run(clock)
    assert done == ["a at 5.0", "a at 5.0"]


@pytest.mark.parametrize(
    ("weather", "expected"),
    [
        (Weather(), {"arrived": 1000}),
        (Weather(loss=1.0), {"lost": 1000}),
        (Weather(duplication=1.0), {"arrived": 2000}),
    ],
)
def test_messages_arrive_once_twice_or_never(weather: Weather, expected: dict[str, int]) -> None:
    clock = VirtualClock()
    network = Network(clock, random.Random(7))
    network.weather = weather
    seen = {"arrived": 0, "lost": 0}

    def count(what: str) -> None:
        seen[what] += 1

    a, b = Process(clock, "a"), Process(clock, "b")
    for _ in range(1000):
        network.send(a, b, lambda: count("arrived"), lambda: count("lost"))
    run(clock)
    assert {what: number for what, number in seen.items() if number} == expected


def test_late_messages_overtake_each_other() -> None:
    clock, arrived = VirtualClock(), list[int]()
    network = Network(clock, random.Random(7))
    network.weather = Weather(lateness=0.5, latest=1.0)
    a, b = Process(clock, "a"), Process(clock, "b")
    for number in range(100):
        network.send(a, b, lambda number=number: arrived.append(number))  # type: ignore[misc]
    run(clock)
    assert sorted(arrived) == list(range(100))
    assert arrived != sorted(arrived)
    assert clock.now > 0.5


def test_a_cut_lets_nothing_pass_in_either_direction_until_it_is_mended() -> None:
    clock, arrived = VirtualClock(), list[str]()
    network = Network(clock, random.Random(7))
    places = {name: Process(clock, name) for name in "abc"}

    def send_all() -> list[str]:
        arrived.clear()
        for source, target in ("ab", "ba", "ac", "bc"):
            network.send(places[source], places[target], lambda name=source + target: arrived.append(name))  # type: ignore[misc]
        run(clock)
        return sorted(arrived)

    mend = network.cut(frozenset("a"), frozenset("b"))
    assert send_all() == ["ac", "bc"]
    mend()
    assert send_all() == ["ab", "ac", "ba", "bc"]


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_segment_belongs_to_its_generation_unless_it_is_used_again(is_fresh: bool) -> None:
    memory = SimulatedMemory(is_fresh=is_fresh)
    held = memory.segment(FIRST)
    assert memory.segment(FIRST) is held
    held[0] = (0, "of an older step")
    assert memory.segment(GenerationId(1, 2)) == ({} if is_fresh else held)


def test_every_mistake_in_a_step_gives_another_digest() -> None:
    chain = undisturbed(COURSE)
    parts = [contribute(BEGINNING, lane) for lane in range(COURSE.lanes)]
    right = apply_step(BEGINNING, parts)
    assert right.digest == chain[Cursor(1)]
    assert apply_step(BEGINNING, reversed(parts)) == right
    other = Holding(BEGINNING.cursor, "other weights")
    wrong = [
        apply_step(BEGINNING, parts[:-1]),
        apply_step(BEGINNING, [*parts, parts[0]]),
        apply_step(BEGINNING, [*parts[:-1], contribute(other, 2)]),
        apply_step(BEGINNING, [*parts[:-1], contribute(right, 2)]),
        apply_step(other, parts),
    ]
    assert len({holding.digest for holding in (right, *wrong)}) == 6


class Witness:
    """A worker as the referee sees it."""

    def __init__(self, step: int = 0) -> None:
        self.pid, self.slot, self.place = 101, 0, "worker 0"
        self.blocks: dict[int, int] = {}
        self.is_server = False
        self.holding = Holding(Cursor(step), undisturbed(COURSE)[Cursor(step)])
        self.is_alive, self.is_dirty = True, False
        self.promised: GenerationId | None = None
        self.lease = 1.0

    has_heard_the_end = False

    def lease_remaining(self) -> float:
        return self.lease


def generation(number: int = 1, step: int = 0) -> Generation:
    return Generation(GenerationId(1, number), (Member(0, "host:101", range(3), "", Cursor(step)),))


def referee(*declared: Generation) -> Referee:
    watching = Referee(COURSE, VirtualClock())
    for one in declared:
        watching.declared(one, {})
    return watching


def save(watching: Referee, worker: Witness) -> None:
    watching.committed(worker, worker.holding)


PARTS = [contribute(BEGINNING, lane) for lane in range(COURSE.lanes)]


def test_the_referee_lets_pass_what_is_right() -> None:
    watching, worker = referee(generation()), Witness()
    watching.begins(worker, generation())
    watching.applies(worker, generation(), [FIRST], PARTS)
    worker.holding = apply_step(worker.holding, PARTS)
    watching.completed(worker)
    save(watching, worker)
    assert watching.newest_checkpoint() == worker.holding
    watching.declared(generation(2, step=1), {0: worker})


def test_the_referee_sees_a_step_after_the_lease_the_generation_or_the_promise() -> None:
    late, promised = Witness(), Witness()
    late.lease, promised.promised = -0.5, FIRST
    with pytest.raises(InvariantBroken, match=r"invariant 6.* applies step 1 0\.500 s after its lease ended"):
        referee(generation()).applies(late, generation(), [FIRST], PARTS)
    with pytest.raises(InvariantBroken, match=r"invariant 6.* in generation 1\.1, after 1\.2 began"):
        referee(generation(), generation(2)).applies(Witness(), generation(), [FIRST], PARTS)
    with pytest.raises(InvariantBroken, match=r"invariant 6.* although it has promised to have left 1\.1"):
        referee(generation()).applies(promised, generation(), [FIRST], PARTS)
    with pytest.raises(InvariantBroken, match=r"invariant 6.* commits step 0 \(trained\) after its lease ended"):
        referee(generation()).committed(late, late.holding)


def test_the_referee_sees_foreign_missing_and_repeated_lanes() -> None:
    with pytest.raises(InvariantBroken, match=r"invariant 6.* with a contribution of another generation"):
        referee(generation(2)).applies(Witness(), generation(2), [GenerationId(1, 2), FIRST], PARTS)
    for parts in (PARTS[:-1], [*PARTS, PARTS[0]]):
        with pytest.raises(InvariantBroken, match="invariant 3"):
            referee(generation()).applies(Witness(), generation(), [FIRST], parts)


def test_the_referee_sees_a_state_that_the_undisturbed_run_never_has() -> None:
    worker = Witness()
    worker.holding = Holding(Cursor(1), "something else")
    for look in (Referee.completed, Referee.copied):
        with pytest.raises(InvariantBroken, match=r"invariant 2.* worker 0 holds something else at step 1"):
            look(referee(generation()), worker)


def test_the_referee_sees_a_generation_that_does_not_begin_where_its_members_stand() -> None:
    with pytest.raises(InvariantBroken, match=r"worker 0 stands at step 2 \(trained\), and it had promised step 1"):
        referee().declared(generation(1, step=1), {0: Witness(2)})
    with pytest.raises(InvariantBroken, match=r"invariant 1.* begins in generation 1\.1 at step 2"):
        referee(generation()).begins(Witness(2), generation())
    with pytest.raises(InvariantBroken, match=r"generation 1\.1 is declared after 1\.2"):
        referee(generation(2)).declared(generation(), {})


def test_the_referee_sees_a_job_that_goes_back_behind_a_checkpoint() -> None:
    watching = referee(generation())
    save(watching, Witness(4))
    watching.declared(generation(2, step=4), {})
    with pytest.raises(InvariantBroken, match=r"invariant 2.* generation 1\.3 begins at step 2 .* before a checkpoint"):
        watching.declared(generation(3, step=2), {})


def test_the_referee_sees_a_newcomer_that_begins_before_the_checkpoint_that_there_was_when_it_was_started() -> None:
    watching, newcomer = referee(generation()), Witness()
    save(watching, Witness(4))
    watching.started(newcomer)
    with pytest.raises(InvariantBroken, match=r"invariant 2.* generation 1\.2 begins at step 0 .* before a checkpoint"):
        watching.declared(generation(2), {0: newcomer})


def test_a_checkpoint_that_is_spoilt_is_asked_of_nobody() -> None:
    watching, older, newer = referee(generation()), Witness(2), Witness(4)
    save(watching, older)
    save(watching, newer)
    watching.spoilt(newer.holding.cursor)
    assert watching.newest_checkpoint() == older.holding
    newcomer = Witness(2)
    watching.started(newcomer)
    watching.declared(generation(2, step=2), {0: newcomer})


def test_the_referee_sees_what_is_written_down_twice() -> None:
    watching = referee()
    watching.recorded(["a", "b"])
    with pytest.raises(InvariantBroken, match="an event is recorded twice: b"):
        watching.recorded(["b"])
    lost = "worker 0 (pid 101 on host a) was killed by SIGKILL."
    watching.lost(lost)
    with pytest.raises(InvariantBroken, match="a loss is recorded twice"):
        watching.lost(lost)


def test_the_referee_sees_an_end_that_should_not_be() -> None:
    watching = referee()
    watching.ended(Failure("WorkerLost", "… so the job is stopped; …"), "", "failure")
    watching.ended(None, "", "interrupted")
    watching.ended(None, undisturbed(COURSE)[max(undisturbed(COURSE))], "complete")
    with pytest.raises(InvariantBroken, match=r"invariant 4.* the job ends with PeerLost"):
        watching.ended(Failure("PeerLost", "… and no process was found dead: …"), "", "failure")
    with pytest.raises(InvariantBroken, match=r"invariant 4.* the job ends with DivergedError"):
        watching.ended(Failure("DivergedError", "no"), "", "failure")
    with pytest.raises(InvariantBroken, match=r"invariant 2.* the job is complete with other bits"):
        watching.ended(None, "other bits", "complete")
    assert not issubclass(InvariantBroken, QuorateError), "nobody but the simulation may catch it"


def test_the_referee_sees_somebody_let_go_with_what_nobody_else_holds() -> None:
    leaving, other = Witness(4), Witness(0)
    watching = referee()
    watching.declared(generation(1, step=4), {0: leaving})
    with pytest.raises(InvariantBroken, match=r"invariant 2.* worker 0 is let go with step 4 .* nobody else holds"):
        watching.dismissed(leaving, [leaving, other])
    watching.dismissed(leaving, [leaving, Witness(3)])
    save(watching, leaving)
    watching.dismissed(leaving, [leaving, other])


def test_after_a_succession_what_was_not_answered_may_be_told_again() -> None:
    watching = referee()
    watching.recorded(["a"])
    watching.succeeded()
    watching.recorded(["a"])
    with pytest.raises(InvariantBroken, match="an event is recorded twice: a"):
        watching.recorded(["a"])


def test_the_referee_sees_a_place_that_stays_empty() -> None:
    clock = VirtualClock()
    watching = Referee(COURSE, clock)
    for now in (0.0, 4.0):
        clock.now = now
        watching.sees_empty([1])
    watching.sees_empty([])
    clock.now = 8.0
    watching.sees_empty([1])
    clock.now = 14.0
    with pytest.raises(InvariantBroken, match=r"invariant 4.* the place of worker 1 stays empty"):
        watching.sees_empty([1])


def test_the_referee_sees_a_checkpoint_that_is_torn_and_one_that_is_removed_though_it_is_the_newest() -> None:
    watching, worker = referee(generation()), Witness(2)
    with pytest.raises(InvariantBroken, match=r"invariant 5.* the checkpoint of step 2 .* holds half of it"):
        watching.committed(worker, Holding(Cursor(2), "half of it"))
    save(watching, Witness(2))
    save(watching, Witness(4))
    watching.removed(worker, Cursor(2))
    with pytest.raises(InvariantBroken, match=r"invariant 5.* removes the newest valid checkpoint, of step 4"):
        watching.removed(worker, Cursor(4))


def test_a_disk_loses_what_was_not_committed_and_never_the_last_whole_checkpoint() -> None:
    watching = referee(generation())
    disk = SimulatedDisk(watching)
    for step in (2, 4):
        worker = Witness(step)
        layout, progress = HeldLayout(lambda held=worker.holding: held), Progress(Cursor(step))  # type: ignore[misc]
        held = layout.state(progress)
        manifest = Manifest(step, 0, "", (), held.encoded.skeleton, "", {}, {}, {})
        attempt = disk.open(Cursor(step))
        attempt.write(0, 1, TensorFile(held.encoded.tensors).chunks())
        disk.commit_for(worker, attempt.name, manifest, lambda: None)
    on_its_way = disk.open(Cursor(3))
    disk.lose_unsynced()
    with pytest.raises(AttemptGone):
        on_its_way.written()
    assert disk.spoil_newest() == Cursor(4)
    assert disk.spoil_newest() is None
    assert disk.restore(Path("memory/step-00000004")) == Witness(2).holding
