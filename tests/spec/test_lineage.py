"""The lineage of a job: its parts as jobs, and what a branch adds to it."""

from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.spec.changes import chained, parts_of, with_branch
from quorate.spec.load import resolve_mapping
from quorate.spec.resolved import ResolvedJob, dump_job
from quorate.spec.yaml_document import read_yaml

KEYS: dict[str, Any] = {
    "task": "digits:Digits",
    "batch_size": 64,
    "steps": 300,
    "params": {"rate": 0.3, "width": 8},
    "notify": {"command": "./tell.sh"},
    "checkpoint": {"every": 50, "to": ["checkpoints", "/mnt/backup"]},
}
LINEAGE: list[dict[str, Any]] = [
    {"until": 100, "params": {"rate": 0.1, "width": 8}, "clip_norm": None},
    {"until": 200, "params": {"rate": 0.2, "width": 8}, "schedule": {"kind": "cosine"}},
]


def job(**keys: Any) -> ResolvedJob:
    return resolve_mapping({**KEYS, **keys}, "job", {}, ())


def test_each_part_is_the_job_with_what_it_was_then() -> None:
    first, second = parts_of(job(lineage=LINEAGE, clip_norm=1.0))
    assert (first.spec.params["rate"], first.spec.clip_norm, first.spec.schedule) == (0.1, None, None)
    assert (second.spec.params["rate"], second.spec.clip_norm) == (0.2, 1.0)
    assert second.spec.schedule is not None and second.spec.schedule.kind == "cosine"
    assert first.spec.lineage == [] and [part.until for part in second.spec.lineage] == [100]
    # The rate of a schedule depends on the length.
    assert first.spec.steps == second.spec.steps == 300
    assert first.origins["params.rate"] == "lineage[0].params"
    assert (first.spec.notify, first.spec.checkpoint.to, first.spec.checkpoint.every) == (None, ["checkpoints"], 50)


def test_a_recorded_job_keeps_what_a_part_leaves_out() -> None:
    written = read_yaml(dump_job(job(lineage=LINEAGE))).value
    assert [set(part) for part in written["lineage"]] == [
        {"until", "params", "clip_norm"},
        {"until", "params", "schedule"},
    ]
    assert resolve_mapping(written, "job", {}, ()).spec == job(lineage=LINEAGE).spec


def test_a_branch_of_a_branch_has_the_lineage_of_both() -> None:
    first = job(params={"rate": 0.1})
    second = with_branch(first.spec, job(params={"rate": 0.2}), 100)
    third = with_branch(second.spec, job(params={"rate": 0.3}, clip_norm=2.0, lineage=_dumped(second)), 200)
    assert _dumped(third) == [
        {"until": 100, "params": {"rate": 0.1}, "clip_norm": None},
        {"until": 200, "params": {"rate": 0.2}, "clip_norm": None},
    ]
    jobs = [*parts_of(third), third]
    assert [(part.spec.params["rate"], part.spec.clip_norm) for part in jobs] == [(0.1, None), (0.2, None), (0.3, 2.0)]
    assert third.origins["lineage"] == "branch at step 200"


def _dumped(resolved: ResolvedJob) -> list[dict[str, Any]]:
    return [part.model_dump() for part in resolved.spec.lineage]


@pytest.mark.parametrize(
    "keys", [{"batch_size": 32}, {"steps": 400}, {"early_stop": {"metric": "loss", "patience": 2}}, {"seed": 1}]
)
def test_a_branch_that_no_lineage_can_tell_has_none(keys: dict[str, Any]) -> None:
    before = job(lineage=LINEAGE)
    lineage = [] if "early_stop" in keys else LINEAGE
    assert (
        with_branch(
            before.spec.model_copy(update={"lineage": job(lineage=lineage).spec.lineage}),
            job(lineage=lineage, **keys),
            250,
        ).spec.lineage
        == []
    )


def test_a_branch_that_means_the_same_changes_nothing() -> None:
    before = job(lineage=LINEAGE)
    after = job(lineage=LINEAGE, workers=2, name="other")
    assert with_branch(before.spec, after, 250) is after


def test_jobs_that_led_to_each_other_become_one() -> None:
    rates = [0.1, 0.1, 0.2, 0.3]
    whole = chained([job(params={"rate": rate}) for rate in rates], [50, 100, 200])
    # What branches off without a change goes on as it was.
    assert [(part["until"], part["params"]["rate"]) for part in _dumped(whole)] == [(100, 0.1), (200, 0.2)]
    assert whole.spec.params == {"rate": 0.3}
    assert chained([job()], []).spec == job().spec


def test_a_branch_that_is_given_no_lineage_has_that_of_its_origin() -> None:
    before = job(lineage=LINEAGE)
    assert with_branch(before.spec, job(), 250).spec.lineage == before.spec.lineage
    assert [part["until"] for part in _dumped(with_branch(before.spec, job(params={"rate": 1}), 250))] == [
        100,
        200,
        250,
    ]


MISTAKES = {
    "out of order": (
        {"lineage": [LINEAGE[1], LINEAGE[0]]},
        "lineage: its parts (job) end after steps 200, 100. Each begins where the one before it ends: write them in "
        "order.",
    ),
    "longer than the job": (
        {"lineage": LINEAGE, "steps": 200},
        "lineage: its last part (job) ends after step 200, and the job after 200 (job). Use more steps, or leave that "
        "part out.",
    ),
    "that may stop early": (
        {"lineage": LINEAGE[:1], "early_stop": {"metric": "loss", "patience": 2}},
        "lineage: a part of it (job) might end before its step by early_stop (job). Leave early_stop out.",
    ),
}


@pytest.mark.parametrize(("keys", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_lineage_that_leads_nowhere(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(JobFileError) as caught:
        job(**keys)
    assert [str(problem) for problem in caught.value.problems] == [told]


def test_a_key_that_cannot_change_on_the_way_is_refused() -> None:
    with pytest.raises(JobFileError, match=r"lineage.0.batch_size: there is no such key"):
        job(lineage=[{"until": 5, "batch_size": 3}])
