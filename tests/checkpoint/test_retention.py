from hypothesis import given
from hypothesis import strategies as st

from quorate.checkpoint.retention import Reason, Retention, reasons, surplus
from quorate.core.generation import Cursor, Phase

cursors = st.builds(Cursor, st.integers(0, 50), st.sampled_from(Phase))
retentions = st.builds(Retention, st.integers(0, 10), st.none() | st.integers(1, 20))
best_steps = st.none() | st.integers(0, 50)


def steps(*numbers: int) -> list[Cursor]:
    return [Cursor(number) for number in numbers]


def test_the_oldest_go_first() -> None:
    assert surplus(steps(30, 10, 20), Retention(1), None, Cursor(30)) == tuple(steps(10, 20))


def test_the_best_step_stays_in_both_phases() -> None:
    saved = [*steps(10, 20, 30), Cursor(10, Phase.EVALUATED)]
    assert surplus(saved, Retention(1), 10, Cursor(30)) == tuple(steps(20))


def test_every_so_many_steps_one_stays_for_ever() -> None:
    saved = steps(*range(5, 65, 5))
    assert surplus(saved, Retention(2, keep_every=20), None, Cursor(60)) == tuple(steps(5, 10, 15, 25, 30, 35, 45, 50))


def test_nothing_goes_while_none_is_known_to_be_whole() -> None:
    assert surplus(steps(1, 2, 3), Retention(1), None, None) == ()


def test_where_the_last_are_damaged_the_newest_whole_one_stays() -> None:
    assert surplus(steps(1, 2, 3, 4), Retention(2), None, Cursor(2)) == (Cursor(1),)


def test_each_reason_is_told() -> None:
    told = reasons(steps(10, 15, 20, 25, 30), Retention(2, keep_every=10), 20, Cursor(15))
    assert told == {
        Cursor(10): (Reason.EVERY,),
        Cursor(15): (Reason.WAY_BACK,),
        Cursor(20): (Reason.BEST, Reason.EVERY),
        Cursor(25): (Reason.LAST,),
        Cursor(30): (Reason.LAST, Reason.EVERY),
    }


def test_the_best_before_stays_until_the_best_itself_is_saved() -> None:
    saved, bests = steps(10, 20, 30, 40), {Cursor(10): 10, Cursor(20): 10, Cursor(30): 25, Cursor(40): 25}
    assert reasons(saved, Retention(1), 25, Cursor(40), bests)[Cursor(10)] == (Reason.BEST_SAVED,)
    assert surplus(saved, Retention(1), 25, Cursor(40), bests) == tuple(steps(20, 30))
    saved.append(Cursor(25, Phase.EVALUATED))
    assert surplus(saved, Retention(1), 25, Cursor(40), bests) == tuple(steps(10, 20, 30))


def test_for_one_that_is_coming_neither_the_best_so_far_goes_nor_what_is_newer_than_the_newest_whole() -> None:
    saved, bests = steps(10, 20, 30, 40), {Cursor(step): 10 for step in (10, 20, 30, 40)}
    assert surplus(saved, Retention(1), 50, Cursor(30), bests, coming=Cursor(50)) == (Cursor(20),)
    assert surplus(saved, Retention(1), 20, Cursor(40), bests, coming=Cursor(50)) == tuple(steps(10, 30))


@given(st.sets(cursors, min_size=1), retentions, best_steps, st.data())
def test_what_must_stay_stays_and_no_more(
    saved: set[Cursor], retention: Retention, best: int | None, data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from(sorted(saved)))
    gone = surplus(list(saved), retention, best, whole)
    left = saved - set(gone)
    last = set(sorted(saved)[len(saved) - min(retention.keep, len(saved)) :])
    every = {cursor for cursor in saved if retention.keep_every and cursor.step % retention.keep_every == 0}
    assert left == last | every | {whole} | {cursor for cursor in saved if cursor.step == best}
    assert list(gone) == sorted(gone)


@given(st.sets(cursors, min_size=1), retentions, best_steps, st.data())
def test_what_has_gone_once_leaves_nothing_more_to_go(
    saved: set[Cursor], retention: Retention, best: int | None, data: st.DataObject
) -> None:
    whole = data.draw(st.sampled_from(sorted(saved)))
    left = saved - set(surplus(list(saved), retention, best, whole))
    assert surplus(list(left), retention, best, whole) == ()


def test_the_newest_from_before_the_last_audit_of_every_worker_stays() -> None:
    saved = steps(10, 20, 30, 40)
    told = reasons(saved, Retention(1, audited=25), None, Cursor(40))
    assert told[Cursor(20)] == (Reason.AUDITED,)
    assert surplus(saved, Retention(1, audited=25), None, Cursor(40)) == tuple(steps(10, 30))
    assert surplus(saved, Retention(1, audited=5), None, Cursor(40)) == tuple(steps(10, 20, 30))
