from hypothesis import given
from hypothesis import strategies as st

from quorate.checkpoint.retention import surplus
from quorate.core.cursor import Cursor, Phase

cursors = st.builds(Cursor, st.integers(0, 50), st.sampled_from(Phase))


def steps(*numbers: int) -> list[Cursor]:
    return [Cursor(number) for number in numbers]


def test_the_oldest_go_first() -> None:
    assert surplus(steps(30, 10, 20), 1, None, Cursor(30)) == tuple(steps(10, 20))


def test_the_best_step_stays_in_both_phases() -> None:
    saved = [*steps(10, 20, 30), Cursor(10, Phase.EVALUATED)]
    assert surplus(saved, 1, 10, Cursor(30)) == tuple(steps(20))


def test_nothing_goes_while_none_is_known_to_be_whole() -> None:
    assert surplus(steps(1, 2, 3), 1, None, None) == ()


@given(st.sets(cursors, min_size=1), st.integers(0, 10), st.none() | st.integers(0, 50), st.data())
def test_what_must_stay_stays_and_no_more(saved: set[Cursor], keep: int, best: int | None, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(sorted(saved)))
    gone = surplus(list(saved), keep, best, whole)
    left = saved - set(gone)
    last = set(sorted(saved)[len(saved) - min(keep, len(saved)) :])
    assert left == last | {whole} | {cursor for cursor in saved if cursor.step == best}
    assert list(gone) == sorted(gone)
