"""Requests are given to loaders so that none is lost, none has nothing to do, and each can work ahead."""

from collections.abc import Iterator
from itertools import count, islice

import pytest

from quorate.data.loader import LoaderAssignment
from quorate.data.sampler import Request, Source


def plan(lanes: int, accumulate: int = 1) -> Iterator[Request]:
    """Endless; the number of a request is its sample."""
    number = count()
    while True:
        for lane in range(lanes):
            for _ in range(accumulate):
                yield Request(Source.TRAINING, 0, (next(number),), lane)


def taken(assignment: LoaderAssignment, requests: int) -> list[tuple[int, int]]:
    """Who answers each request of the plan, and what that one answers then."""
    answers = [assignment.requests(loader) for loader in range(assignment.loaders)]
    ready = [next(each) for each in answers]
    found = []
    for _ in range(requests):
        loader = assignment.next_loader()
        found.append((loader, ready[loader].indices[0]))
        ready[loader] = next(answers[loader])
    return found


@pytest.mark.parametrize("accumulate", [1, 3, 300])
@pytest.mark.parametrize(("lanes", "loaders"), [(5, 2), (1, 1), (1, 4), (2, 5), (3, 3), (2, 1)])
def test_requests_are_answered_in_the_order_of_the_plan(lanes: int, loaders: int, accumulate: int) -> None:
    found = taken(LoaderAssignment(plan(lanes, accumulate), loaders, lanes, 2), 2000)
    assert [number for _, number in found] == list(range(2000))
    assert {loader for loader, _ in found} == set(range(loaders)), "and every loader has something to do"


def test_a_lane_keeps_its_loader_where_there_are_lanes_enough() -> None:
    assignment = LoaderAssignment(islice(plan(5), 1000), 2, 5, 2)
    given = [list(assignment.requests(loader)) for loader in range(2)]
    assert [{request.lane for request in each} for each in given] == [{0, 2, 4}, {1, 3}]
    assert sorted(request.indices[0] for each in given for request in each) == list(range(1000))


def test_loaders_that_share_a_lane_take_turns_of_as_many_requests_as_they_work_ahead() -> None:
    assert [loader for loader, _ in taken(LoaderAssignment(plan(1), 3, 1, 2), 8)] == [0, 0, 1, 1, 2, 2, 0, 0]
    by_lane = [loader for loader, _ in taken(LoaderAssignment(plan(2), 5, 2, 1), 8)]
    assert by_lane[0::2] == [0, 2, 4, 0]
    assert by_lane[1::2] == [1, 3, 1, 3]


def test_no_more_of_the_plan_is_run_through_than_the_loaders_ask_for() -> None:
    drawn = []

    def counted() -> Iterator[Request]:
        for request in plan(1):
            drawn.append(request)
            yield request

    assignment = LoaderAssignment(counted(), 4, 1, 2)
    for loader in range(4):
        assert next(assignment.requests(loader)).indices[0] == 2 * loader
    assert len(drawn) == 7
