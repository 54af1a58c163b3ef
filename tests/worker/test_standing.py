"""What a worker makes of its coordinator's directives, in whatever order they come."""

import threading

import pytest

from quorate.core.cursor import Cursor
from quorate.core.errors import GenerationOver
from quorate.core.failure import Failure
from quorate.core.generation import Generation, GenerationId, Member
from quorate.core.position import Position
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.codec import decode_position, encode_failure, encode_generation, encode_id, encode_position
from quorate.worker.standing import Dismissed, JobEnded, Standing

HERE, THERE = "127.0.0.1:5000", "127.0.0.1:5001"


def generation(number: int, incarnation: int = 1, address: str = HERE) -> Generation:
    members = (Member(0, address, range(2)), Member(1, THERE, range(2, 4)))
    return Generation(GenerationId(incarnation, number), members)


def formed(one: Generation) -> pb.Directive:
    return pb.Directive(formed=encode_generation(one))


def regroup(one: Generation, *, at_boundary: bool) -> pb.Directive:
    return pb.Directive(regroup=pb.RegroupDirective(generation=encode_id(one.id), at_boundary=at_boundary))


def wish(one: Generation, request: str) -> pb.Directive:
    return pb.Directive(save=pb.SaveDirective(generation=encode_id(one.id), request=request))


def is_asked(one: Standing) -> bool:
    return one.save_asked


@pytest.fixture
def standing() -> Standing:
    standing = Standing()
    standing.join(0, 4711, HERE, Cursor(7))
    return standing


def current(standing: Standing) -> Generation | None:
    return standing.present(1).generation


def test_a_newer_generation_is_taken_over_and_an_older_one_is_not(standing: Standing) -> None:
    standing.heed(formed(generation(2)))
    standing.heed(formed(generation(1)))
    assert current(standing) == generation(2)
    standing.heed(formed(generation(1, incarnation=2)))
    assert current(standing) == generation(1, incarnation=2)


def test_a_generation_with_another_process_in_our_place_is_not_ours(standing: Standing) -> None:
    standing.heed(formed(generation(1, address="127.0.0.1:9")))
    assert current(standing) is None


def test_whoever_waits_for_a_generation_gets_it(standing: Standing) -> None:
    heard: list[Generation] = []
    waiting = threading.Thread(target=lambda: heard.append(standing.await_generation(None, lambda: None, 5.0)))
    waiting.start()
    standing.heed(formed(generation(1)))
    waiting.join(5)
    assert heard == [generation(1)]


def test_a_generation_that_is_over_closes_its_links_once_it_has_some(standing: Standing) -> None:
    closed: list[str] = []
    standing.heed(formed(generation(1)))
    standing.close_when_over(generation(1), lambda: closed.append("first"))
    standing.heed(regroup(generation(1), at_boundary=True))
    assert (closed, standing.break_requested) == ([], True)
    standing.check()
    standing.heed(regroup(generation(1), at_boundary=False))
    assert closed == ["first"]
    with pytest.raises(GenerationOver):
        standing.check()
    standing.heed(formed(generation(2)))
    standing.check()
    assert not standing.break_requested


def test_the_end_of_the_job_is_told_to_whoever_asks(standing: Standing) -> None:
    failure = Failure("UserCodeError", "no")
    standing.heed(pb.Directive(end=pb.EndDirective(failure=encode_failure(failure))))
    with pytest.raises(JobEnded, match="no"):
        standing.check()
    with pytest.raises(JobEnded, match="no"):
        standing.await_generation(None, lambda: None, 1.0)


class TestPosition:
    def test_before_the_first_generation(self, standing: Standing) -> None:
        assert standing.present(2) == Position(None, Cursor(7), has_left=True, has_trained=False)

    def test_at_work(self, standing: Standing) -> None:
        standing.heed(formed(generation(1)))
        standing.hold()
        assert standing.present(2) == Position(generation(1), Cursor(), has_left=False, has_trained=True)

    def test_between_two_generations(self, standing: Standing) -> None:
        standing.heed(formed(generation(1)))
        standing.leave(Cursor(9))
        assert standing.present(2) == Position(generation(1), Cursor(9), has_left=True, has_trained=False)

    def test_what_was_told_holds_against_a_late_word_of_the_coordinator_before(self, standing: Standing) -> None:
        standing.heed(formed(generation(1)))
        standing.leave(Cursor(9))
        told = standing.present(2)
        standing.heed(formed(generation(2)))
        assert standing.present(2) == told
        standing.heed(formed(generation(1, incarnation=2)))
        assert standing.present(2).generation == generation(1, incarnation=2)

    def test_coming_back_twice_to_the_same_one_does_not_make_it_deaf(self, standing: Standing) -> None:
        standing.present(2)
        standing.present(2)
        standing.heed(formed(generation(1, incarnation=2)))
        assert standing.present(2).generation == generation(1, incarnation=2)

    def test_whom_the_others_have_left_out_holds_what_they_leave_behind(self, standing: Standing) -> None:
        standing.heed(formed(generation(1)))
        standing.hold()
        standing.leave(Cursor(9))
        standing.heed(formed(generation(2, address="127.0.0.1:9")))
        assert not standing.present(2).has_trained

    @pytest.mark.parametrize(("incarnation", "goes"), [(1, False), (2, True)])
    def test_a_late_dismissal_of_the_coordinator_before_is_not_heeded(
        self, standing: Standing, incarnation: int, goes: bool
    ) -> None:
        standing.present(2)
        dismissal = pb.DismissDirective(worker=0, pid=4711, incarnation=incarnation)
        standing.heed(pb.Directive(dismiss=dismissal))
        expected: type[Exception] = Dismissed if goes else TimeoutError

        def give_up() -> None:
            raise TimeoutError

        with pytest.raises(expected):
            standing.await_generation(None, give_up, 0.1)

    @pytest.mark.parametrize("has_been_in_one", [True, False])
    def test_travels_as_it_is(self, has_been_in_one: bool) -> None:
        position = Position(generation(3) if has_been_in_one else None, Cursor(4), has_left=False, has_trained=True)
        assert decode_position(encode_position(position)) == position


def test_a_wish_for_a_checkpoint_is_fulfilled_once_however_often_it_is_told(standing: Standing) -> None:
    standing.heed(formed(generation(1)))
    assert not is_asked(standing)
    standing.heed(wish(generation(1), "a"))
    assert is_asked(standing)
    standing.save_begun()
    standing.heed(wish(generation(1), "a"))
    assert not is_asked(standing), "it was told again, since the connection broke"
    standing.heed(wish(generation(1), "b"))
    assert is_asked(standing)


def test_in_another_generation_a_checkpoint_is_wished_for_anew(standing: Standing) -> None:
    standing.heed(formed(generation(1)))
    standing.heed(wish(generation(1), "a"))
    standing.heed(formed(generation(2)))
    standing.heed(wish(generation(1), "b"))
    assert not is_asked(standing)
    standing.heed(wish(generation(2), "a"))
    assert is_asked(standing)


def test_only_who_hosts_the_first_lane_has_the_others_save() -> None:
    other = Standing()
    other.join(1, 4712, THERE, Cursor(7))
    other.heed(formed(generation(1)))
    other.heed(wish(generation(1), "a"))
    assert current(other) == generation(1)
    assert not is_asked(other)
