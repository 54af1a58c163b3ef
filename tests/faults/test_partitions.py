"""Real partitions: workers on namespaces whose cables are cut while they train, and healed after a while.

At most one side goes on, nobody waits for ever, and the bits are those of the undisturbed run.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_networks import BadNetworks
from command import PATIENCE, await_condition
from faults.namespaced_job import (
    FAILURE_TIMEOUT,
    LEASE,
    STEPS,
    TASK,
    WORKERS,
    NamespacedJob,
    holders,
    in_namespaces,
    members,
    wait_until,
)
from quorate.chaos.network_namespaces import inside_network
from quorate.engines.local import COORDINATOR

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("namespaces_allowed", "unmeasured")]

EVERYBODY = set(range(WORKERS))
# What happens between the moment at which the silence has lasted long enough and the next step.
GRACE = 0.5
# A link is silent for long enough, and is then tried once more for as long; twice where others were blamed at first.
LINK_PATIENCE = 3 * FAILURE_TIMEOUT + 4 * GRACE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("namespaces")
    (folder / "task.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    """The digest of the job when nothing happens to it; on one worker, which costs least and has no namespace."""
    job = NamespacedJob(folder, None, workers=1)
    try:
        outcome = job.finish(PATIENCE)
    finally:
        job.close()
    assert outcome.failure is None
    return str(outcome.result["weights_digest"])


@pytest.fixture
def job(folder: Path, undisturbed: str, unmeasured: None) -> Iterator[NamespacedJob]:
    with in_namespaces(folder) as job:
        job.await_step(5)
        yield job


def assert_undisturbed(job: NamespacedJob, digest: str) -> None:
    """It ends as if nothing had happened, and no step was done by two sides."""
    outcome = job.finish(PATIENCE)
    assert outcome.failure is None
    assert outcome.result["weights_digest"] == digest
    steps = [event["step"] for event in job.events("step")]
    assert sorted(set(steps)) == sorted(steps)
    assert max(steps) == STEPS


def assert_all_told(job: NamespacedJob) -> None:
    """No step is missing from what the run tells."""
    assert {event["step"] for event in job.events("step")} == set(range(1, STEPS + 1))


# --- one worker


@pytest.mark.long
def test_two_of_three_go_on_without_one_that_is_cut_off_for_eight_seconds(job: NamespacedJob, undisturbed: str) -> None:
    namespaces = job.namespaces
    assert namespaces is not None
    cut = time.time()
    namespaces.cut(2)
    assert not namespaces.reaches(2, COORDINATOR, 0.2)
    assert not namespaces.reaches(0, 2, 0.2)
    smaller = job.await_generation({0, 1}, cut)
    first = job.await_event("step", smaller["time"])
    assert first["time"] - cut <= FAILURE_TIMEOUT + GRACE
    assert smaller["from_step"] == max(event["step"] for event in job.events("step") if event["time"] < first["time"])
    wait_until(cut + 8.0)
    assert not namespaces.reaches(2, COORDINATOR, 0.2)
    assert all(2 not in members(event) for event in job.events("generation", cut))
    namespaces.heal(2)
    healed = time.time()
    await_condition("the cable to carry again", lambda: namespaces.reaches(2, COORDINATOR, 0.1), 60.0)
    job.await_generation(EVERYBODY, healed)
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


WAYS = {
    "cut off from the coordinator": [(1, COORDINATOR), (COORDINATOR, 1)],
    "not heard by the coordinator": [(1, COORDINATOR)],
    "not answered by the coordinator": [(COORDINATOR, 1)],
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_has_lost_the_coordinator_alone(way: str, job: NamespacedJob, undisturbed: str) -> None:
    namespaces = job.namespaces
    assert namespaces is not None
    cut = time.time()
    for sender, receiver in WAYS[way]:
        namespaces.cut_one_way(sender, receiver)
    for pair in ((1, COORDINATOR), (COORDINATOR, 1)):
        assert namespaces.reaches(*pair, 0.3) == (pair not in WAYS[way])
    assert namespaces.reaches(0, 1)
    assert namespaces.reaches(1, 0)
    smaller = job.await_generation({0, 2}, cut)
    assert smaller["time"] - cut <= FAILURE_TIMEOUT + 2 * GRACE
    # Its lease ends before its lanes are somebody else's: no step of the first generation comes after that.
    assert all(event["step"] <= smaller["from_step"] for event in job.events("step") if event["time"] < smaller["time"])
    wait_until(cut + 3 * FAILURE_TIMEOUT)
    healed = time.time()
    namespaces.heal(1)
    job.await_generation(EVERYBODY, healed)
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


# --- a link of the ring


@pytest.mark.long
@pytest.mark.parametrize("ways", [[(0, 1), (1, 0)], [(0, 1)]], ids=["both ways", "one way"])
def test_a_link_is_cut_while_both_ends_reach_the_coordinator(
    ways: list[tuple[int, int]], job: NamespacedJob, undisturbed: str
) -> None:
    namespaces = job.namespaces
    assert namespaces is not None
    cut = time.time()
    for pair in ways:
        namespaces.cut_one_way(*pair)
    for pair in ((0, 1), (1, 0)):
        assert namespaces.reaches(*pair, 0.3) == (pair not in ways)
    for place in (0, 1):
        assert namespaces.reaches(place, COORDINATOR)
        assert namespaces.reaches(COORDINATOR, place)
    without = job.await_event("generation", cut, lambda event: not {0, 1} <= members(event), LINK_PATIENCE)
    step = job.await_event("step", without["time"])
    assert step["time"] - cut <= LINK_PATIENCE
    assert job.events("lost", cut) == [], "nobody is dead"
    healed = time.time()
    namespaces.heal()
    job.await_generation(EVERYBODY, healed)
    job.await_step(max(event["step"] for event in job.events("step")) + 10)
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


# --- the coordinator


def cut_all_from_coordinator(namespaces: BadNetworks) -> None:
    for place in EVERYBODY:
        namespaces.cut_from_coordinator(place)
    assert not any(namespaces.reaches(place, COORDINATOR, 0.05) for place in EVERYBODY)
    assert not any(namespaces.reaches(COORDINATOR, place, 0.05) for place in EVERYBODY)


@pytest.mark.long
def test_a_coordinator_cut_off_from_all_for_much_less_than_the_lease(job: NamespacedJob, undisturbed: str) -> None:
    assert job.namespaces is not None
    before = max(job.steps_of_workers())
    cut_all_from_coordinator(job.namespaces)
    await_condition("steps without a coordinator", lambda: max(job.steps_of_workers()) > before + 1, LEASE)
    job.namespaces.heal()
    healed = time.time()
    job.await_event("step", healed + FAILURE_TIMEOUT)
    assert job.events("lost") == []
    assert [members(event) for event in job.events("generation")] == [EVERYBODY]
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


@pytest.mark.long
def test_a_coordinator_cut_off_from_all_for_little_less_than_the_lease(job: NamespacedJob, undisturbed: str) -> None:
    """What was sent meanwhile is sent again after twice the time: leases may end, which costs a generation."""
    assert job.namespaces is not None
    began = time.time()
    cut_all_from_coordinator(job.namespaces)
    wait_until(began + LEASE * 0.65)
    job.namespaces.heal()
    job.await_event("step", time.time() + FAILURE_TIMEOUT)
    assert job.events("lost") == []
    generations = [members(event) for event in job.events("generation")]
    assert generations in ([EVERYBODY], [EVERYBODY] * 2)
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


@pytest.mark.long
def test_nobody_makes_a_step_after_the_leases_when_the_coordinator_is_cut_off_from_all(
    job: NamespacedJob, undisturbed: str
) -> None:
    assert job.namespaces is not None
    cut_all_from_coordinator(job.namespaces)
    wait_until(time.time() + LEASE + GRACE)
    at_the_end = max(job.steps_of_workers())
    told = len(job.events("step"))
    over = time.time() + 2 * FAILURE_TIMEOUT
    while time.time() < over:
        assert max(job.steps_of_workers()) <= at_the_end
        time.sleep(0.02)  # between two looks
    assert len(job.events("step")) == told
    healed = time.time()
    job.namespaces.heal()
    job.await_generation(EVERYBODY, healed)
    assert_undisturbed(job, undisturbed)


@pytest.mark.long
def test_what_was_saved_while_the_coordinator_was_cut_off_from_all_is_told_too(
    job: NamespacedJob, undisturbed: str
) -> None:
    assert job.namespaces is not None
    cut_all_from_coordinator(job.namespaces)
    wait_until(time.time() + FAILURE_TIMEOUT + GRACE)
    healed = time.time()
    job.namespaces.heal()
    job.await_generation(EVERYBODY, healed)
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


# --- packets that get lost


@pytest.mark.long
def test_five_percent_of_all_packets_get_lost(job: NamespacedJob, undisturbed: str) -> None:
    namespaces = job.namespaces
    assert namespaces is not None
    for place in EVERYBODY:
        namespaces.lose(place, 5.0)
    lossy = time.time()
    assert 0.80 < part_that_arrives(namespaces, 0, COORDINATOR) < 0.99
    job.await_step(max(event["step"] for event in job.events("step")) + 20)
    assert time.time() - lossy < PATIENCE
    namespaces.heal()
    assert part_that_arrives(namespaces, 0, COORDINATOR) == 1.0
    assert_undisturbed(job, undisturbed)
    assert_all_told(job)


def part_that_arrives(namespaces: BadNetworks, sender: int, receiver: int, count: int = 500) -> float:
    source, target = namespaces.network_of(sender), namespaces.network_of(receiver)

    def open_socket() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with (
        inside_network(target.namespace, open_socket) as listening,
        inside_network(source.namespace, open_socket) as sending,
    ):
        listening.bind((target.address, 0))
        listening.setblocking(False)
        arrived = 0
        for _ in range(count):
            sending.sendto(b"?", listening.getsockname())
            with contextlib.suppress(BlockingIOError):
                arrived += len(listening.recv(1))
    return arrived / count


# --- what is left


LAUNCHER = """
import sys, time
from pathlib import Path
from faults.namespaced_job import in_namespaces, namespace_of
with in_namespaces(Path(sys.argv[1])) as job:
    job.await_step(3)
    job.namespaces.cut(1)
    job.namespaces.lose(2, 5.0)
    networks = [job.namespaces.network_of(place) for place in (-1, 0, 1, 2)]
    print(job.namespaces.cable, *(namespace_of(network.namespace) for network in networks), flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_a_launcher_that_is_killed_leaves_no_namespace_no_cable_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{LAUNCHER}", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        cable, *networks = launcher.stdout.readline().split()
        assert Path("/sys/class/net", cable).exists()
        assert len(holders(set(networks))) >= len(networks) + WORKERS
        launcher.kill()
    await_condition("the end of the processes", lambda: not holders(set(networks)), 60.0)
    # What could not be sent to the namespace that is cut off is tried for some seconds more.
    await_condition("the end of the cable", lambda: not Path("/sys/class/net", cable).exists(), 60.0)
