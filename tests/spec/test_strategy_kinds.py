"""Several kinds of one section, as `strategy` has them: told apart by `kind`, each with keys and marks of its own."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, ValidationError

from quorate.core.errors import JobFileError
from quorate.spec import rules
from quorate.spec.changes import refused_on_resume
from quorate.spec.job import JobSpec, RingSpec
from quorate.spec.keys import Count, Mark, Section, keys_of, spelled_out
from quorate.spec.override import Layers, Override
from quorate.spec.problems import describe_errors


class ToySpec(Section):
    kind: Literal["toy"]
    rate: Annotated[float, Field(gt=0)]
    servers: Annotated[Count, Mark.MANNER] = 1


Either = Annotated[RingSpec | ToySpec, Field(discriminator="kind")]


class ToyJob(Section):
    strategy: Annotated[Either, Mark.MEANING, BeforeValidator(spelled_out)] = RingSpec()


PLAIN = {"task": "a.py:A", "batch_size": 8, "steps": 1}
SYNCED = {"kind": "ddp", "sync_batch_norm": True}


def problems_of(strategy: Any) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        ToyJob.model_validate({"strategy": strategy})
    return [str(problem) for problem in describe_errors(raised.value, ToyJob)]


def test_a_kind_is_chosen_by_its_name() -> None:
    assert ToyJob.model_validate({"strategy": "ring"}) == ToyJob()
    assert ToyJob.model_validate({"strategy": {"kind": "toy", "rate": 2.0}}).strategy == ToySpec(kind="toy", rate=2.0)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("rings", 'strategy.kind: the text "rings" is not ring or toy. Did you mean ring?'),
        ({"kind": "ddp"}, 'strategy.kind: the text "ddp" is not ring or toy.'),
        ({"servers": 2}, "strategy.kind: it is missing, and it has no default: give ring or toy."),
        ({"kind": "toy"}, "strategy.rate: it is missing, and it has no default: give a number."),
        ({"kind": "toy", "rate": 1.0, "servers": 0}, "strategy.servers: 0 is not a whole number of at least 1."),
        ({"kind": "ring", "server": 2}, "strategy.server: there is no such key. Did you mean strategy.servers?"),
    ],
)
def test_mistakes_are_told_at_the_key_that_was_written(strategy: Any, problem: str) -> None:
    assert problems_of(strategy) == [problem]


def test_a_key_of_a_section_may_have_a_mark_of_its_own() -> None:
    marks = {path: key.mark for path, key in keys_of(ToyJob).items() if "compress" not in path}
    assert marks == {
        "strategy": Mark.MEANING,
        "strategy.kind": Mark.MEANING,
        "strategy.rate": Mark.MEANING,
        "strategy.servers": Mark.MANNER,
    }


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        ({"kind": "ring"}, {"kind": "ddp"}, True),
        ({"kind": "ddp"}, {"kind": "ddp", "compress": {"dtype": "bf16"}}, False),
        (SYNCED, SYNCED, True),
        (SYNCED, {"kind": "ddp"}, False),
        ({"kind": "ring"}, SYNCED, False),
        ({"kind": "fsdp"}, {"kind": "ring"}, True),
        ({"kind": "ddp"}, {"kind": "fsdp", "tensor": 2, "units": ["a"], "offload": True}, True),
        # Weights or gradients that are rounded on the way are no other order of additions.
        ({"kind": "fsdp", "gather": "bf16"}, {"kind": "fsdp", "gather": "bf16", "tensor": 2}, True),
        ({"kind": "fsdp", "gather": "bf16"}, {"kind": "ring"}, False),
        ({"kind": "ddp"}, {"kind": "fsdp", "reduce": "bf16"}, False),
        ({"kind": "fsdp", "gather": "bf16"}, {"kind": "fsdp"}, False),
        ({"kind": "ddp", "compress": {"dtype": "fp16"}}, {"kind": "ddp", "compress": {"dtype": "bf16"}}, False),
    ],
)
def test_a_run_may_go_on_with_a_strategy_that_keeps_the_bits(
    before: dict[str, Any], after: dict[str, Any], keeps: bool
) -> None:
    old, new = (
        JobSpec.model_validate({**PLAIN, "lanes": 4, "workers": 2, "min_workers": 2, "strategy": strategy})
        for strategy in (before, after)
    )
    assert (not refused_on_resume(old, new)) is keeps


def test_workers_that_normalize_together_stay_as_many_on_a_resume() -> None:
    keys = {**PLAIN, "lanes": 4, "strategy": SYNCED}
    old, new = (JobSpec.model_validate({**keys, "workers": count, "min_workers": count}) for count in (2, 4))
    assert [change.key for change in refused_on_resume(old, new)] == ["workers"]


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"workers": "auto"}, "workers", "needs a fixed number of workers"),
        ({"workers": 3, "min_workers": 3}, "workers", "4 = 1 × 3 + 1"),
        ({"min_workers": 1}, "min_workers", "1 of 2 workers would normalize by the statistics of other samples"),
        ({"balance": "speed"}, "balance", "different numbers of passes"),
        ({"last_batch": "keep"}, "last_batch", "different numbers of passes"),
        ({"on_bad_sample": "skip"}, "on_bad_sample", "different numbers of passes"),
    ],
)
def test_workers_that_normalize_together_make_the_same_passes(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(JobFileError) as raised:
        rules.checked_job({**PLAIN, "lanes": 4, "workers": 2, "min_workers": 2, "strategy": SYNCED, **keys})
    (problem,) = raised.value.problems
    assert problem.path == path
    assert words in problem.text


def test_another_kind_leaves_out_the_keys_of_the_one_before() -> None:
    given = Layers({"strategy": {"kind": "parameter-server", "servers": 2}}, {})
    assert given.under([Override("strategy.kind", "ring", "--set")]).values == {"strategy": {"kind": "ring"}}
    same = given.under([Override("strategy.kind", "parameter-server", "--set")])
    assert same.values == {"strategy": {"kind": "parameter-server", "servers": 2}}


def test_a_kind_that_is_given_by_its_name_alone_stays_when_one_of_its_keys_is_set() -> None:
    given = Layers({"strategy": "parameter-server"}, {"strategy": "job.yaml line 3"})
    over = given.under([Override("strategy.servers", 2, "--set strategy.servers")])
    assert over.values == {"strategy": {"kind": "parameter-server", "servers": 2}}
    assert over.origin("strategy.kind") == "job.yaml line 3"


@pytest.mark.parametrize(
    ("strategy", "is_broken"), [("ring", True), ("ddp", True), ({"kind": "fsdp", "tensor": 3}, False)]
)
def test_the_kind_says_whether_each_worker_hosts_a_lane(strategy: Any, is_broken: bool) -> None:
    job = JobSpec.model_validate(PLAIN | {"workers": 3, "lanes": 2, "strategy": strategy})
    assert ("workers" in {problem.path for problem in rules.broken_rules(job)}) is is_broken


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [({"precision": "bf16", "loss_scale": {"initial": 1024}}, "loss_scale", "nothing with precision: bf16")],
    ids=str,
)
def test_a_loss_is_scaled_where_all_have_the_sum_of_the_gradients(keys: dict[str, Any], path: str, words: str) -> None:
    keys = {"task": "task.py:Task", "batch_size": 64, "steps": 1, "precision": "fp16", **keys}
    with pytest.raises(JobFileError) as raised:
        rules.checked_job(keys)
    (problem,) = raised.value.problems
    assert problem.path == path
    assert words in problem.text


def test_the_largest_batch_of_a_sharded_model_is_not_looked_for() -> None:
    job = PLAIN | {"batch_size": "auto", "workers": 2}
    assert JobSpec.model_validate(job | {"strategy": "ddp"})
    with pytest.raises(JobFileError, match="batch_size: auto is not possible with strategy: fsdp"):
        rules.checked_job(job | {"strategy": "fsdp"})
