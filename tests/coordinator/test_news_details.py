"""What a supervisor is told of vacant places, and what a new coordinator goes by."""

from dataclasses import replace

import pytest

from coordinator.played import SETTINGS, heartbeat, killed, pid_of, registered, training
from quorate.coordinator.events import ExitReported, GrantLease
from quorate.coordinator.forming import take_over
from quorate.coordinator.membership import decide
from quorate.coordinator.places import wakes
from quorate.coordinator.states import Decision, Forming, Handover, Members, Recalling, Recollection

NEXT = replace(SETTINGS, incarnation=4)
NOTHING = Recollection(None, None, has_begun=False)


@pytest.mark.parametrize(
    ("launcher_knows", "is_written", "generations"), [(False, False, 0), (True, False, 1), (False, True, 1)]
)
def test_a_job_has_begun_if_the_launcher_or_the_event_log_says_so(
    launcher_knows: bool, is_written: bool, generations: int
) -> None:
    handover = Handover(frozenset({(0, pid_of(0))}), frozenset(), has_begun=launcher_knows)
    state = take_over(NEXT, handover, replace(NOTHING, has_begun=is_written), 0.0)
    assert isinstance(state, Recalling)
    assert state.members.generations == generations


def test_who_comes_to_its_place_is_not_ordered_any_more_and_others_are() -> None:
    refills = {0: (5.0, True), 1: (6.0, False)}
    members = Members(SETTINGS, ticked=1.0, wanted=3, generations=1, awaited=frozenset({0, 1, 2}), refills=refills)
    after = decide(Forming(members, since=1.0), registered(0), 2.0).state
    assert isinstance(after, Forming)
    assert after.members.refills == {1: (6.0, False)}


def test_whoever_waits_for_news_looks_again_after_an_exit_and_not_after_a_heartbeat() -> None:
    state = training()
    quiet = Decision(state, (GrantLease(0, 4.0),), "alive")
    assert not wakes(heartbeat(0), quiet)
    gone = killed(1)
    assert isinstance(gone, ExitReported)
    assert wakes(gone, Decision(state, (), "it counted as lost"))
    assert wakes(heartbeat(0), decide(state, gone, 1.0))
