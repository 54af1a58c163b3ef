from hypothesis import given
from hypothesis import strategies as st

from quorate.core.generation import Cursor, Generation, GenerationId, Member, Phase
from quorate.core.timing import Timing

GENERATION = Generation(
    GenerationId(2, 5),
    (Member(7, "host:1", range(2)), Member(3, "host:2", range(2, 3)), Member(9, "x", range(3, 5))),
)


def test_members_stand_in_lane_order_whatever_their_numbers() -> None:
    assert GENERATION.lanes == 5
    assert [GENERATION.position(worker) for worker in (7, 3, 9)] == [0, 1, 2]


def test_a_restarted_coordinator_outranks_every_number_before() -> None:
    assert GenerationId(1, 99) < GenerationId(2, 1) < GenerationId(2, 2)
    assert str(GenerationId(2, 1)) == "2.1"


def test_an_evaluated_step_is_more_advanced_than_a_trained_one() -> None:
    trained = Cursor().trained()
    assert trained == Cursor(1, Phase.TRAINED)
    assert Cursor() < trained < trained.evaluated() < trained.trained() == trained.evaluated().trained()


@given(st.floats(0.01, 1e6))
def test_a_worker_gives_up_before_its_lanes_are_given_away(failure_timeout: float) -> None:
    timing = Timing(failure_timeout)
    assert timing.heartbeat_every * 3 < timing.lease < timing.failure_timeout < timing.connect
