"""Which lanes are audited, and what follows from it where they differ."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.errors import LanesDiffer, LanesDisputed, LinkError, UnsupportedModelError
from quorate.core.generation import Member
from quorate.lanes.chunks import host_lanes
from quorate.replica.losses import LossSum
from quorate.training.audit import AuditNote, AuditPlan, AuditRecord, Doubt, LaneAudit, Outcome, Verdict, verdict
from quorate.training.lane import LaneResult

counts = st.integers(1, 8).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes)))


def plan(lanes: int, workers: int, every: int, first: int = 1) -> AuditPlan:
    return AuditPlan(every, [(10 + place, hosted) for place, hosted in enumerate(host_lanes(lanes, workers))], first)


@given(counts, st.integers(1, 40), st.integers(1, 100))
def test_a_step_is_due_where_it_has_audits(sizes: tuple[int, int], every: int, first: int) -> None:
    planned = plan(*sizes, every, first)
    assert all((planned.due(step - 1) == step) == bool(planned.audits(step)) for step in range(first, first + 60))


@given(counts, st.integers(1, 40), st.integers(1, 300))
def test_one_lane_in_so_many_is_audited_and_each_worker_as_often_as_the_others(
    shape: tuple[int, int], every: int, begin: int
) -> None:
    lanes, workers = shape
    planned = plan(lanes, workers, every, first=0)
    # However the steps are cut, between two audits of a worker there are so many lanes.
    steps = range(begin, begin + 4 * every * workers // lanes + 2)
    audits = [(step, audit) for step in steps for audit in planned.audits(step)]
    assert abs(len(audits) - len(steps) * lanes / every) <= 1
    for worker, hosted in planned.hosts:
        own = [(step, audit) for step, audit in audits if audit.owner == worker]
        assert own[0][0] - begin <= every * workers / lanes + 1
        apart = [(later - earlier) * lanes for (earlier, _), (later, _) in pairwise(own)]
        assert all(every * workers - lanes < each < every * workers + lanes for each in apart)
        assert all(audit.lane in hosted for _, audit in own)
        assert all((audit.auditor == worker) == (workers == 1) for _, audit in own)


@given(counts, st.integers(1, 1000), st.integers(1, 1000))
def test_in_the_first_step_of_a_generation_everybody_is_looked_at_by_somebody_else(
    shape: tuple[int, int], every: int, first: int
) -> None:
    lanes, workers = shape
    planned = plan(lanes, workers, every, first)
    audits = planned.audits(first)
    if workers > 1:
        assert sorted(audit.owner for audit in audits) == [worker for worker, _ in planned.hosts]
        assert sorted(audit.auditor for audit in audits) == [worker for worker, _ in planned.hosts]


def test_all_lanes_and_all_auditors_have_their_turn() -> None:
    planned = plan(8, 3, 5, first=0)
    audits = [audit for step in range(1, 200) for audit in planned.audits(step)]
    assert {audit.lane for audit in audits} == set(range(8))
    assert len({(audit.owner, audit.auditor) for audit in audits}) == 6


@pytest.mark.parametrize(
    ("found", "judged"),
    [
        ({0: ["a", "a"], 1: ["b", "b"], 2: ["a"]}, Verdict((1,))),  # always the same wrong bit
        ({0: ["a", "a"], 1: ["b", "c"], 2: ["a"]}, Verdict((1,))),  # another one each time
        ({0: ["b", "a"], 1: ["a", "a"], 2: ["a"]}, Verdict((0,))),  # once
        ({0: ["a", "a"], 1: ["b", "c"]}, Verdict((1,))),
        ({0: ["a", "a"], 1: ["b", "b"]}, Verdict(is_open=True)),
        ({0: ["a", "b"], 1: ["c", "d"]}, Verdict()),
        ({0: ["a", "b"], 1: ["c", "d"], 2: ["e"]}, Verdict()),
        ({0: ["a", "a"], 1: ["b", "b"], 2: ["c"]}, Verdict()),  # each has its own: it depends on the process
        ({0: ["a", "b", "a"]}, Verdict((0,))),
        ({0: ["a", "b", "c"]}, Verdict()),
        ({0: ["a", "b"]}, Verdict(is_open=True)),  # memory ran out when it was computed again
        ({0: ["a", "a"], 1: ["b"]}, Verdict(is_open=True)),
        ({0: ["a"], 1: ["b"], 2: ["a"]}, Verdict((1,))),
        ({0: ["a", "a"], ~1: ["b"], 1: ["a"]}, Verdict((~1,))),  # the one that was replaced
        ({0: ["a", "a"], ~1: ["b"], 1: ["b"]}, Verdict((0,))),
    ],
)
def test_who_is_wrong(found: Mapping[int, list[str]], judged: Verdict) -> None:
    assert verdict(found) == judged


def test_everything_that_a_lane_computes_counts() -> None:
    result = LaneResult(1, 4, 3, {"": LossSum(1.5, 4)}, digests=(7, 8))
    same = replace(result, lane=2, digests=(7, 9), log={"x": (1.0, 1.0)})
    # Neither its number nor what it logs, nor single tensors.
    assert Outcome.of(result, {}).digest == Outcome.of(same, {}, ["a"]).digest
    others = [
        replace(result, samples=5),
        replace(result, present=1),
        replace(result, losses={"": LossSum(-0.0, 4)}),
        replace(result, losses={"": LossSum(0.0, 4)}),
        replace(result, digests=(6, 8)),
        replace(result, losses={"": LossSum(1.5, 5)}),
    ]
    told = [Outcome.of(each, {}).digest for each in (result, *others)] + [Outcome.of(result, {"mean": "a1"}).digest]
    assert len(set(told)) == len(told)


class Played:
    """The audits of one worker among others, who answer as they are told to; nothing: memory runs out."""

    def __init__(self, own: int, workers: int, answers: Mapping[int, str], clean: Mapping[int, int]) -> None:
        self.answers, self.withdrawn = answers, list[int]()
        self.members = [
            Member(worker, "", hosted) for worker, hosted in zip(range(workers), host_lanes(4, workers), strict=True)
        ]
        self.record = AuditRecord(dict(clean))
        self.told = {worker: AuditNote({str(worker): clean[worker]}, {}, {}) for worker in range(workers)}
        planned = AuditPlan(4, [(member.worker, member.lanes) for member in self.members], 5)
        self.audit = LaneAudit(
            planned,
            self.members[own],
            self.members,
            self.record,
            self.gather,
            self.withdrawn.append,
            lambda _: self.outcome(own),
        )

    def outcome(self, worker: int) -> Outcome | None:
        digest = self.answers.get(worker, "")
        return Outcome(digest, {"the gradient of 'w'": digest, "the loss": "1"}) if digest else None

    def gather(self, step: int, index: int, payload: bytes) -> tuple[bytes, ...]:
        assert step == 5
        if index == 17:
            raise LinkError("worker 1 is gone")
        told = [self.outcome(member.worker) for member in self.members]
        return tuple(b"" if one is None else json.dumps(asdict(one)).encode() for one in told)

    def settle(self, own: str, seen: str) -> Any:
        audit = self.audit.plan.audits(5)[0]
        told = self.told
        told[audit.owner] = replace(told[audit.owner], own={str(audit.lane): own})
        told[audit.auditor] = replace(told[audit.auditor], seen={str(audit.lane): seen})
        differing = self.audit.differing(5, told)
        assert differing == audit
        self.audit.settle(5, differing, told)


def test_the_culprit_is_named_and_what_it_may_have_spoilt_is_withdrawn() -> None:
    _, owner, auditor = Played(0, 3, {}, dict.fromkeys(range(3), 0)).audit.plan.audits(5)[0]
    values = dict.fromkeys(range(3), "a") | {auditor: "b"}
    played = Played(owner, 3, values, dict.fromkeys(range(3), 4) | {auditor: 2})
    told = f"worker {auditor} is wrong. Nothing that was saved after step 2 is used any more"
    with pytest.raises(LanesDiffer, match=told):
        played.settle("a", "b")
    assert set(played.withdrawn) == {2}


def test_where_all_are_right_the_least_of_their_steps_is_known() -> None:
    played = Played(0, 2, {}, {0: 1, 1: 1})
    told = {
        worker: AuditNote(
            {str(worker): 1},
            {str(audit.lane): "a" for audit in played.audit.plan.audits(5) if audit.owner == worker},
            {str(audit.lane): "a" for audit in played.audit.plan.audits(5) if audit.auditor == worker},
        )
        for worker in range(2)
    }
    assert played.audit.differing(5, told) is None
    assert (played.record.clean, played.record.floor, played.record.done) == ({0: 5, 1: 5}, 5, 2)
    assert played.audit.differing(6, {0: AuditNote({"0": 5}, {}, {}), 1: AuditNote({"1": 3}, {}, {})}) is None
    assert played.record.floor == 3


def test_what_was_not_compared_does_not_count_as_right() -> None:
    played = Played(0, 2, {}, {0: 1, 1: 1})
    first, second = played.audit.plan.audits(5)
    told = {
        first.owner: AuditNote({str(first.owner): 1}, {str(first.lane): "a"}, {str(second.lane): "b"}),
        second.owner: AuditNote(
            {str(second.owner): 1}, {str(second.lane): "b"}, {}
        ),  # memory ran out in what it audits
    }
    assert played.audit.differing(5, told) is None
    assert (played.record.clean, played.record.floor, played.record.done) == ({first.owner: 1, second.owner: 5}, 1, 1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_memory_that_runs_out_is_no_difference(workers: int) -> None:
    clean = dict.fromkeys(range(workers), 4)
    _, owner, auditor = Played(0, workers, {}, clean).audit.plan.audits(5)[0]
    third = 3 - owner - auditor
    played = Played(owner, workers, {third: "a"}, clean)
    expected, told = {
        1: (LanesDiffer, "nobody can say who is wrong"),
        2: (LinkError, "is gone"),  # and a third decides
        3: (LanesDiffer, f"worker {auditor} is wrong"),
    }[workers]
    with pytest.raises(expected, match=told):
        played.settle("a", "b")


def test_a_doubt_is_looked_at_by_a_worker_that_is_alone_at_once() -> None:
    played = Played(0, 1, {}, {0: 4})
    played.audit.plan = replace(played.audit.plan, every=200)
    assert replace(played.audit).due == 50
    played.record.doubt = Doubt(4, 1, 0, "a", 1, "b", 2)
    assert replace(played.audit).due == 0


def test_code_that_is_no_function_of_its_lane_is_refused() -> None:
    played = Played(0, 3, {0: "d", 1: "e", 2: "f"}, {0: 4, 1: 4, 2: 4})
    told = r"(?s)Lane \d of step 5 .* \(the gradient of 'w' differs\)\. .* loss\(\) gives another result"
    with pytest.raises(UnsupportedModelError, match=told):
        played.settle("a", "b")
    assert not played.withdrawn


@pytest.mark.parametrize(
    ("newcomer", "culprit"), [("a", r"the worker \d that was replaced is"), ("b", r"worker \d is")]
)
def test_two_who_repeat_themselves_are_told_apart_by_a_third(newcomer: str, culprit: str) -> None:
    (lane, owner, auditor), *_ = Played(0, 2, {}, {0: 4, 1: 4}).audit.plan.audits(5)
    values = {owner: "a", auditor: "b"}
    leaving = Played(auditor, 2, values, {0: 4, 1: 2})
    with pytest.raises(LanesDisputed, match="A third has to compute it"):
        leaving.settle("a", "b")
    staying = Played(owner, 2, values, {0: 4, 1: 2})
    with pytest.raises(LinkError, match="is gone"):
        staying.settle("a", "b")
    assert staying.record.doubt == Doubt(5, lane, owner, "a", auditor, "b", {0: 4, 1: 2}[auditor])
    again = Played(owner, 2, {owner: "a", auditor: newcomer}, {owner: 4, auditor: 5})
    again.record.doubt = staying.record.doubt
    told = again.told | {owner: again.audit.note(5, [], [])}
    differing = again.audit.differing(5, told)
    assert differing == staying.record.doubt
    with pytest.raises(LanesDiffer, match=culprit):
        again.audit.settle(5, differing, told)


def test_a_doubt_that_nobody_can_settle_any_more_takes_all_back() -> None:
    played = Played(0, 2, {}, {0: 4, 1: 6})
    doubt = Doubt(3, 1, 0, "a", 1, "b", 2)
    with pytest.raises(LanesDiffer, match="nobody can say who is wrong"):
        played.audit.settle(5, doubt, played.told)
    assert set(played.withdrawn) == {2}


def test_a_doubt_that_stays_open_a_second_time_takes_all_back() -> None:
    """The third, whose memory does not suffice, may be in the place of the one that was replaced."""
    (lane, owner, auditor), *_ = Played(0, 2, {}, {0: 4, 1: 4}).audit.plan.audits(5)
    again = Played(owner, 2, {owner: "a"}, {owner: 4, auditor: 5})
    with pytest.raises(LanesDiffer, match="nobody can say who is wrong") as refusal:
        again.audit.settle(5, Doubt(5, lane, owner, "a", auditor, "b", 2), again.told)
    assert refusal.value.culprits == ()
    assert set(again.withdrawn) == {2}


def test_who_was_replaced_is_not_told_as_who_is_in_its_place() -> None:
    (lane, owner, auditor), *_ = Played(0, 2, {}, {0: 4, 1: 4}).audit.plan.audits(5)
    again = Played(owner, 2, {owner: "a", auditor: "a"}, {owner: 4, auditor: 5})
    with pytest.raises(LanesDiffer, match="that was replaced is wrong") as refusal:
        again.audit.settle(5, Doubt(5, lane, owner, "a", auditor, "b", 2), again.told)
    assert refusal.value.culprits == ()


def test_a_process_in_the_place_of_another_is_as_clean_as_that_was_until_it_is_found_right() -> None:
    """It may run on the same processor: what was saved since the other was last found right may be wrong."""
    played = Played(0, 2, {}, {0: 4, 1: 2})
    told = played.told | {0: played.audit.note(9, [], []), 1: AuditNote({"1": 8}, {}, {})}
    assert played.audit.differing(9, told) is None
    assert played.record.floor == 2


def test_a_lane_that_is_audited_twice_in_a_step_is_read_once() -> None:
    members = [Member(worker, "", hosted) for worker, hosted in enumerate(host_lanes(3, 2))]
    plan = AuditPlan(1, [(member.worker, member.lanes) for member in members], 1)
    for member in members:
        audit = LaneAudit(plan, member, members, AuditRecord(), lambda *_: (), lambda _: None)
        assert all(len(set(audit.lanes(step))) == len(audit.lanes(step)) for step in range(1, 20))
