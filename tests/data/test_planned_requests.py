"""What will be read is known in advance, from wherever one joins."""

from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from data.jobs import sampler
from quorate.core.generation import Cursor, Phase
from quorate.data.sampler import EvaluationPlan, LaneSampler, Request, Source, planned_requests
from quorate.lanes.chunks import host_lanes


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, dict[str, Any], EvaluationPlan]:
    lanes, accumulate = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    batch_size = draw(st.integers(lanes * accumulate, lanes * accumulate + 5))
    keys: dict[str, Any] = {"lanes": lanes, "accumulate": accumulate, "batch_size": batch_size}
    keys |= {"last_batch": "keep"} | draw(st.sampled_from([{"epochs": 2}, {"steps": 5}]))
    every: int | str = draw(st.sampled_from([1, 2, 3]) | st.sampled_from(["epoch", "end"]))
    evaluation = EvaluationPlan(draw(st.integers(0, 9)), draw(st.integers(1, 4)), lanes, every)
    return draw(st.integers(1, 25)), keys, evaluation


def cursors(total: int, evaluation: EvaluationPlan, plan: LaneSampler) -> list[Cursor]:
    """Every cursor that the job passes through."""
    found = []
    for step in range(total + 1):
        found.append(Cursor(step, Phase.TRAINED))
        if evaluation.is_due(step, plan):
            found.append(Cursor(step, Phase.EVALUATED))
    return found


@given(plans(), st.data())
def test_from_any_cursor_the_plan_is_the_tail_of_the_whole(
    case: tuple[int, dict[str, Any], EvaluationPlan], data: st.DataObject
) -> None:
    samples, keys, evaluation = case
    plan = sampler(samples, **keys)
    hosted = data.draw(st.sampled_from(host_lanes(evaluation.lanes, data.draw(st.integers(1, evaluation.lanes)))))
    whole = list(planned_requests(plan, evaluation, hosted, Cursor()))
    remaining = [
        list(planned_requests(plan, evaluation, hosted, cursor))
        for cursor in cursors(plan.total_steps, evaluation, plan)
    ]
    for before, after in pairwise(remaining):
        assert before[len(before) - len(after) :] == after
    assert remaining[0] == whole
    assert remaining[-1] == []


@given(plans(), st.data())
def test_the_workers_together_read_what_one_worker_reads_alone(
    case: tuple[int, dict[str, Any], EvaluationPlan], data: st.DataObject
) -> None:
    samples, keys, evaluation = case
    plan = sampler(samples, **keys)
    hosting = host_lanes(evaluation.lanes, data.draw(st.integers(1, evaluation.lanes)))
    alone = Counter(planned_requests(plan, evaluation, range(evaluation.lanes), Cursor()))
    together: Counter[Request] = Counter()
    for hosted in hosting:
        together += Counter(planned_requests(plan, evaluation, hosted, Cursor()))
    assert together == alone


@given(plans())
def test_each_evaluation_reads_each_validation_sample_once(case: tuple[int, dict[str, Any], EvaluationPlan]) -> None:
    samples, keys, evaluation = case
    plan = sampler(samples, **keys)
    requests = planned_requests(plan, evaluation, range(evaluation.lanes), Cursor())
    read = Counter(i for request in requests if request.source is Source.VALIDATION for i in request.indices)
    times = sum(evaluation.is_due(step, plan) for step in range(plan.total_steps + 1))
    assert read == Counter({index: times for index in range(evaluation.samples) if times})


def test_when_an_evaluation_is_due() -> None:
    plan = sampler(12, lanes=1, batch_size=4, steps=7)

    def due(every: int | str, samples: int = 5) -> list[int]:
        evaluation = EvaluationPlan(samples, 2, 1, every)
        return [step for step in range(8) if evaluation.is_due(step, plan)]

    assert due(2) == [2, 4, 6, 7]
    assert due("epoch") == [3, 6, 7]
    assert due("end") == [7]
    assert due(100) == [7]
    assert due(1, samples=0) == []


def test_the_last_evaluation_batch_may_be_smaller() -> None:
    evaluation = EvaluationPlan(samples=7, batch_size=3, lanes=2, every="end")
    assert evaluation.batches == 3
    assert [evaluation.request(batch).indices for batch in range(3)] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert list(evaluation.hosted_batches(range(1))) == [0, 2]
    assert list(evaluation.hosted_batches(range(1, 2))) == [1]
