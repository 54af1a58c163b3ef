"""How late updates came, of all that a run has told."""

from quorate.history.documents import Staleness
from quorate.observe.seldom_events import StalenessObserved


def test_what_is_told_at_boundaries_adds_up() -> None:
    told = [
        StalenessObserved(step=10, updates={"0": 3, "2": 1}, gap=1, bound=4),
        StalenessObserved(step=20, from_step=10, updates={"2": 2, "13": 2}, gap=3, bound=4),
    ]
    staleness = Staleness.of(told)
    assert staleness is not None
    assert staleness.to_dict() == {"updates": {"0": 3, "2": 3, "13": 2}, "mean": 4.0, "gap": 3, "bound": 4}
    assert staleness.in_words() == (
        "updates came 4.0 others late, at most 13; begun at most 3 steps of 4 allowed ahead"
    )


def test_a_run_with_steps_has_none() -> None:
    assert Staleness.of([]) is None
