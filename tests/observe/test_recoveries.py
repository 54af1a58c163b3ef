"""How a recovery is split into seconds: by when things happened, whatever their order in the file."""

from collections.abc import Iterable
from typing import Any

from made_events import make_event
from quorate.observe.event import Event
from quorate.observe.recoveries import Recovered, Recovery, RecoveryLog

DEATH = "worker 1 (pid 7 on host x.y) was killed by SIGKILL at step 17 while in exchange. Often it is memory."


def recoveries_of(events: Iterable[Event]) -> list[Recovery]:
    return log_of(events).recoveries


def log_of(events: Iterable[Event]) -> RecoveryLog:
    log = RecoveryLog()
    for event in events:
        log.handle(event)
    return RecoveryLog.of(log.state())


def generation(number: int, time: float, workers: list[int], from_step: int) -> Event:
    members = [{"worker": worker, "address": "", "lanes": [worker]} for worker in workers]
    return make_event(
        "generation", None, {"generation": f"1.{number}", "members": members, "from_step": from_step}, time
    )


def lost(worker: int, time: float, step: int | None = 17, message: str = DEATH) -> Event:
    return make_event("lost", step, {"worker": worker, "message": message, "detect_s": 0.003}, time)


def step(number: int, time: float) -> Event:
    return make_event("step", number, {}, time)


def copied(number: int, seconds: float) -> Event:
    return make_event("copied", 20, {"generation": f"1.{number}", "bytes": 9, "seconds": seconds}, 0.0)


BEGIN = [generation(1, 0.0, [0, 1], 0), step(15, 1.0), step(16, 2.0)]


def one(*events: Event) -> Recovery:
    (recovery,) = recoveries_of([*BEGIN, *events])
    return recovery


def test_a_killed_worker_that_is_replaced() -> None:
    assert one(
        lost(1, 2.5),
        generation(2, 2.625, [0], 16),
        step(17, 2.75),
        generation(3, 3.5, [0, 1], 20),
        copied(3, 0.25),
        step(21, 4.0),
    ) == Recovery(
        step=17,
        cause="worker 1 (pid 7 on host x.y) was killed by SIGKILL at step 17 while in exchange",
        worker=1,
        detect_s=0.003,
        reform_s=0.125,
        copy_s=0.25,
        first_step_s=0.125,
        refill_s=1.0,
        steps_lost=0,
    )


def test_steps_that_are_told_late_are_neither_the_first_new_one_nor_lost() -> None:
    recovery = one(lost(1, 2.5), generation(2, 2.625, [0], 18), step(17, 2.25), step(18, 2.375), step(19, 3.125))
    assert (recovery.first_step_s, recovery.steps_lost, recovery.refill_s) == (0.5, 0, None)


def test_steps_that_are_trained_again_are_lost_also_where_they_are_told_late() -> None:
    recovery = one(lost(1, 2.5), generation(2, 3.0, [0], 10), step(17, 2.25), step(18, 9.0))
    assert (recovery.steps_lost, recovery.first_step_s) == (7, 6.0)


def test_all_lost_at_once_are_back_in_the_generation_that_goes_on() -> None:
    first, second = recoveries_of([*BEGIN, lost(1, 2.5), lost(0, 2.75), generation(2, 4.0, [0, 1], 10), step(17, 5.0)])
    assert (first.worker, first.reform_s, first.refill_s, first.steps_lost) == (1, 1.5, 1.5, 6)
    assert (second.worker, second.reform_s, second.refill_s, second.steps_lost) == (0, 1.25, 1.25, 6)


def test_a_replacement_that_dies_before_it_joins_holds_nobody_up() -> None:
    events = [*BEGIN, lost(1, 2.5), generation(2, 3.0, [0], 16), step(17, 4.0), lost(1, 5.0, None)]
    _, second = recoveries_of([*events, step(18, 6.0), generation(3, 7.0, [0, 1], 18)])
    assert (second.reform_s, second.first_step_s, second.refill_s, second.steps_lost) == (0.0, 0.0, 2.0, 0)
    assert second.step == 17


def test_a_second_loss_before_the_next_step() -> None:
    events = [generation(1, 0.0, [0, 1, 2], 0), lost(1, 1.0), generation(2, 2.0, [0, 2], 0), lost(2, 3.0)]
    first, second = recoveries_of([*events, generation(3, 4.0, [0], 0), step(1, 5.0)])
    assert (first.reform_s, first.first_step_s) == (1.0, 3.0)
    assert (second.reform_s, second.first_step_s) == (1.0, 1.0)


def test_nothing_is_recovered_while_nobody_goes_on() -> None:
    assert recoveries_of([*BEGIN, lost(1, 2.5)]) == []


def test_nobody_waits_for_a_step_where_none_was_left() -> None:
    assert one(lost(1, 2.5), generation(2, 3.0, [0], 16)).first_step_s is None


def test_fields_of_another_kind_do_no_harm() -> None:
    odd: dict[str, Any] = {"worker": "one", "members": 3, "from_step": "x", "seconds": None, "detect_s": "soon"}
    kinds = ("lost", "generation", "copied", "run", "step")
    assert recoveries_of([make_event(kind, None, odd, 1.0) for kind in kinds]) == []


def test_what_servers_hold_beyond_the_last_boundary_is_not_lost() -> None:
    by_units = make_event("run", None, {"from_step": 0, "by_units": True}, 0.0)
    events = [by_units, *BEGIN, lost(1, 2.5), generation(2, 3.0, [0], 10), step(17, 3.5)]
    assert [each.steps_lost for each in recoveries_of(events)] == [0]
    rolled_back = make_event("rollback", 10, {}, 2.75)
    events = [by_units, *BEGIN, lost(1, 2.5), rolled_back, generation(2, 3.0, [0], 10), step(11, 3.5)]
    assert [each.steps_lost for each in recoveries_of(events)] == [6]
    events = [by_units, *BEGIN, lost(1, 2.5), generation(2, 2.6, [0], 10), rolled_back, step(11, 3.5)]
    assert [each.steps_lost for each in recoveries_of(events)] == [6]


def test_a_step_of_before_that_is_told_after_the_next_generation_is_not_lost_either() -> None:
    by_units = make_event("run", None, {"from_step": 0, "by_units": True}, 0.0)
    events = [by_units, *BEGIN, lost(1, 2.5), generation(2, 3.0, [0], 10), step(17, 2.25), step(18, 3.5)]
    assert [each.steps_lost for each in recoveries_of(events)] == [0]


def test_workers_that_are_lost_together_stand_still_once_and_lose_their_steps_once() -> None:
    everybody = list(range(6))
    events = [generation(1, 0.0, everybody, 0), step(6, 10.0), *(lost(each, 11.0 + each, 7) for each in everybody)]
    log = log_of([*events, generation(2, 20.0, everybody, 0), step(1, 21.0), step(7, 30.0)])
    assert [each.steps_lost for each in log.recoveries] == [6] * 6
    assert log.total == Recovered(times=1, seconds=10.003, steps=6)


def test_each_return_loses_what_was_trained_since_the_last() -> None:
    # Step 17 is told late: it is lost with the first generation, and not again.
    first = [*BEGIN, lost(1, 2.5), lost(0, 2.5), generation(2, 3.0, [0, 1], 10), step(17, 2.25), step(13, 4.0)]
    second = [lost(0, 6.0, 14), lost(1, 6.5, 14), generation(3, 7.0, [0, 1], 12), step(13, 8.0)]
    log = log_of([*first, *second])
    assert [each.steps_lost for each in log.recoveries] == [7, 7, 1, 1]
    assert log.total == Recovered(times=2, seconds=3.506, steps=8)


def test_a_loss_before_the_first_new_step_belongs_to_the_same_return() -> None:
    events = [*BEGIN, lost(1, 2.5), generation(2, 3.0, [0], 10), lost(0, 3.5, 11), generation(3, 4.0, [0, 1], 10)]
    assert log_of([*events, step(11, 5.0)]).total == Recovered(times=1, seconds=2.503, steps=6)


def test_one_return_of_servers_after_two_losses_is_one() -> None:
    by_units = make_event("run", None, {"from_step": 0, "by_units": True}, 0.0)
    events = [
        by_units,
        *BEGIN,
        lost(1, 2.5),
        generation(2, 2.6, [0], 10),
        lost(0, 2.7),
        make_event("rollback", 10, {}, 3),
    ]
    assert log_of([*events, generation(3, 3.5, [0, 1], 10), step(11, 4.0)]).total.steps == 6
