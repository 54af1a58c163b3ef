"""What a worker makes of its coordinator's directives, in whatever order they come."""

import threading

import pytest

from quorate.core.errors import GenerationOver
from quorate.core.failure import Failure
from quorate.core.generation import Cursor, Generation, GenerationId, Member, Position
from quorate.wire.proto import coordinator_pb2 as pb
from quorate.wire.proto.channel import decode_position, encode_failure, encode_generation, encode_id, encode_position
from quorate.worker.membership_view import Dismissed, JobEnded, MembershipView

HERE, THERE = "127.0.0.1:5000", "127.0.0.1:5001"


def generation(number: int, incarnation: int = 1, address: str = HERE) -> Generation:
    members = (Member(0, address, range(2)), Member(1, THERE, range(2, 4)))
    return Generation(GenerationId(incarnation, number), members)


def formed(one: Generation) -> pb.Directive:
    return pb.Directive(formed=encode_generation(one))


def regroup(one: Generation, *, at_boundary: bool = True, saves: bool = False) -> pb.Directive:
    over = pb.RegroupDirective(generation=encode_id(one.id), at_boundary=at_boundary, saves=saves)
    return pb.Directive(regroup=over)


def wish(one: Generation, request: str) -> pb.Directive:
    return pb.Directive(save=pb.SaveDirective(generation=encode_id(one.id), request=request))


def is_asked(one: MembershipView) -> bool:
    return one.save_asked


def asked(one: MembershipView) -> tuple[bool, bool]:
    return one.break_requested, one.save_requested


class NothingComesError(Exception):
    """Raised by whoever has waited long enough."""


def give_up() -> None:
    raise NothingComesError


@pytest.fixture
def view() -> MembershipView:
    view = MembershipView()
    view.join(0, 4711, HERE, Cursor(7))
    return view


def current(view: MembershipView) -> Generation | None:
    return view.present(1).generation


def test_a_newer_generation_is_taken_over_and_an_older_one_is_not(view: MembershipView) -> None:
    view.handle(formed(generation(2)))
    view.handle(formed(generation(1)))
    assert current(view) == generation(2)
    view.handle(formed(generation(1, incarnation=2)))
    assert current(view) == generation(1, incarnation=2)


def test_a_generation_with_another_process_in_our_place_is_not_ours(view: MembershipView) -> None:
    view.handle(formed(generation(1, address="127.0.0.1:9")))
    assert current(view) is None


def test_whoever_waits_for_a_generation_gets_it(view: MembershipView) -> None:
    heard: list[Generation] = []
    waiting = threading.Thread(target=lambda: heard.append(view.await_generation(None, lambda: None, 5.0)))
    waiting.start()
    view.handle(formed(generation(1)))
    waiting.join(60)
    assert heard == [generation(1)]


def test_a_generation_that_is_over_closes_its_links_once_it_has_some(view: MembershipView) -> None:
    closed: list[str] = []
    view.handle(formed(generation(1)))
    view.close_when_over(generation(1), lambda: closed.append("first"))
    view.handle(regroup(generation(1), at_boundary=True))
    assert (closed, view.break_requested) == ([], True)
    view.check()
    view.handle(regroup(generation(1), at_boundary=False))
    assert closed == ["first"]
    with pytest.raises(GenerationOver):
        view.check()
    view.handle(formed(generation(2)))
    view.check()
    assert not view.break_requested


def test_the_end_of_the_job_is_told_to_whoever_asks(view: MembershipView) -> None:
    failure = Failure("UserCodeError", "no")
    view.handle(pb.Directive(end=pb.EndDirective(failure=encode_failure(failure))))
    with pytest.raises(JobEnded, match="no"):
        view.check()
    with pytest.raises(JobEnded, match="no"):
        view.await_generation(None, lambda: None, 1.0)


class TestPosition:
    def test_before_the_first_generation(self, view: MembershipView) -> None:
        assert view.present(2) == Position(None, Cursor(7), has_left=True, has_trained=False)

    def test_at_work(self, view: MembershipView) -> None:
        view.handle(formed(generation(1)))
        view.hold_state()
        assert view.present(2) == Position(generation(1), Cursor(), has_left=False, has_trained=True)

    def test_between_two_generations(self, view: MembershipView) -> None:
        view.handle(formed(generation(1)))
        view.leave(Cursor(9))
        assert view.present(2) == Position(generation(1), Cursor(9), has_left=True, has_trained=False)

    def test_what_was_told_holds_against_a_late_word_of_the_coordinator_before(self, view: MembershipView) -> None:
        view.handle(formed(generation(1)))
        view.leave(Cursor(9))
        told = view.present(2)
        view.handle(formed(generation(2)))
        assert view.present(2) == told
        view.handle(formed(generation(1, incarnation=2)))
        assert view.present(2).generation == generation(1, incarnation=2)

    def test_coming_back_twice_to_the_same_one_does_not_make_it_deaf(self, view: MembershipView) -> None:
        view.present(2)
        view.present(2)
        view.handle(formed(generation(1, incarnation=2)))
        assert view.present(2).generation == generation(1, incarnation=2)

    def test_whom_the_others_have_left_out_holds_what_they_leave_behind(self, view: MembershipView) -> None:
        view.handle(formed(generation(1)))
        view.hold_state()
        view.leave(Cursor(9))
        view.handle(formed(generation(2, address="127.0.0.1:9")))
        assert not view.present(2).has_trained

    @pytest.mark.parametrize(("incarnation", "goes"), [(1, False), (2, True)])
    def test_a_late_dismissal_of_the_coordinator_before_is_not_heeded(
        self, view: MembershipView, incarnation: int, goes: bool
    ) -> None:
        view.present(2)
        dismissal = pb.DismissDirective(worker=0, pid=4711, incarnation=incarnation)
        view.handle(pb.Directive(dismiss=dismissal))
        with pytest.raises(Dismissed if goes else NothingComesError):
            view.await_generation(None, give_up, 0.1)

    @pytest.mark.parametrize("has_been_in_one", [True, False])
    def test_travels_as_it_is(self, has_been_in_one: bool) -> None:
        position = Position(generation(3) if has_been_in_one else None, Cursor(4), has_left=False, has_trained=True)
        assert decode_position(encode_position(position)) == position


def test_a_wish_for_a_checkpoint_is_fulfilled_once_however_often_it_is_told(view: MembershipView) -> None:
    view.handle(formed(generation(1)))
    assert not is_asked(view)
    view.handle(wish(generation(1), "a"))
    assert is_asked(view)
    view.save_begun()
    view.handle(wish(generation(1), "a"))
    assert not is_asked(view), "it was told again, since the connection broke"
    view.handle(wish(generation(1), "b"))
    assert is_asked(view)


def test_in_another_generation_a_checkpoint_is_wished_for_anew(view: MembershipView) -> None:
    view.handle(formed(generation(1)))
    view.handle(wish(generation(1), "a"))
    view.handle(formed(generation(2)))
    view.handle(wish(generation(1), "b"))
    assert not is_asked(view)
    view.handle(wish(generation(2), "a"))
    assert is_asked(view)


def test_only_who_hosts_the_first_lane_has_the_others_save() -> None:
    other = MembershipView()
    other.join(1, 4712, THERE, Cursor(7))
    other.handle(formed(generation(1)))
    other.handle(wish(generation(1), "a"))
    assert current(other) == generation(1)
    assert not is_asked(other)


def test_a_generation_ends_with_a_checkpoint_only_where_that_is_asked_for(view: MembershipView) -> None:
    assert asked(view) == (False, False)
    view.handle(formed(generation(1)))
    assert asked(view) == (False, False)
    view.handle(regroup(generation(1), saves=False))
    assert asked(view) == (True, False)
    view.handle(regroup(generation(1), saves=True))
    assert asked(view) == (True, True)
    view.handle(formed(generation(2)))
    assert asked(view) == (False, False), "the next is not asked"


def test_the_generation_that_was_left_is_not_the_next(view: MembershipView) -> None:
    view.handle(formed(generation(1)))
    first = view.await_generation(None, give_up, 1.0)
    with pytest.raises(NothingComesError):
        view.await_generation(first, give_up, 0.01)


def test_no_generation_begins_after_the_end(view: MembershipView) -> None:
    view.handle(formed(generation(1)))
    view.handle(pb.Directive(end=pb.EndDirective()))
    with pytest.raises(JobEnded):
        view.await_generation(None, give_up, 1.0)


def test_a_generation_that_is_told_again_is_not_entered_again(view: MembershipView) -> None:
    """All that was declared is told anew where the connection broke."""
    view.handle(formed(generation(1)))
    first = view.await_generation(None, give_up, 1.0)
    view.leave(Cursor(9))
    view.handle(formed(generation(1)))
    assert view.present(1).has_left
    with pytest.raises(NothingComesError):
        view.await_generation(first, give_up, 0.01)


@pytest.mark.parametrize(("worker", "pid"), [(1, 4711), (0, 4712)])
def test_who_has_another_place_or_had_ours_before_is_dismissed_without_us(
    view: MembershipView, worker: int, pid: int
) -> None:
    view.handle(pb.Directive(dismiss=pb.DismissDirective(worker=worker, pid=pid, incarnation=1)))
    with pytest.raises(NothingComesError):
        view.await_generation(None, give_up, 0.01)


@pytest.mark.parametrize(
    "directive",
    [
        pb.Directive(stop=pb.StopDirective(reason="interrupted")),
        regroup(generation(1), saves=False),
        wish(generation(1), "r"),
    ],
    ids=("stop", "regroup", "save"),
)
def test_a_view_knows_whether_anything_was_ever_asked_for(view: MembershipView, directive: pb.Directive) -> None:
    view.handle(formed(generation(1)))
    assert not view.is_asked
    view.handle(directive)
    assert view.is_asked


@pytest.mark.parametrize("directive", [pb.Directive(end=pb.EndDirective()), None], ids=("job", "generation"))
def test_links_are_closed_at_once_where_all_is_over_already(
    view: MembershipView, directive: pb.Directive | None
) -> None:
    view.handle(formed(generation(1)))
    closed: list[str] = []
    view.close_when_over(generation(1), lambda: closed.append("too early"))
    assert closed == []
    view.close_when_over(generation(1), lambda: None)
    view.handle(directive or regroup(generation(1), at_boundary=False))
    view.close_when_over(generation(1), lambda: closed.append("now"))
    assert closed == ["now"]
