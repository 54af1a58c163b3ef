"""Several kinds of one section, as `strategy` has them: told apart by `kind`, each with keys and marks of its own."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, ValidationError

from quorate.spec import resolved, rules
from quorate.spec.job import RingSpec, _spelled_out
from quorate.spec.keys import Mark, keys_of
from quorate.spec.problems import describe_errors
from quorate.spec.resolved import Change, keeps_bits
from quorate.spec.section import Count, Section


class ToySpec(Section):
    kind: Literal["toy"]
    rate: Annotated[float, Field(gt=0)]
    servers: Annotated[Count, Mark.MANNER] = 1


Either = Annotated[RingSpec | ToySpec, Field(discriminator="kind")]


class ToyJob(Section):
    strategy: Annotated[Either, Mark.MEANING, BeforeValidator(_spelled_out)] = RingSpec()


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
        (
            {"kind": "toy", "rate": 1.0, "servers": 0},
            "strategy.servers: 0 is not a whole number of at least 1.",
        ),
        ({"kind": "ring", "server": 2}, "strategy.server: there is no such key. Did you mean strategy.servers?"),
    ],
)
def test_mistakes_are_told_at_the_key_that_was_written(strategy: Any, problem: str) -> None:
    assert problems_of(strategy) == [problem]


def test_a_key_of_a_section_may_have_a_mark_of_its_own() -> None:
    marks = {path: key.mark for path, key in keys_of(ToyJob).items()}
    assert marks == {
        "strategy": Mark.MEANING,
        "strategy.kind": Mark.MEANING,
        "strategy.rate": Mark.MEANING,
        "strategy.servers": Mark.MANNER,
    }


def test_a_run_may_go_on_with_a_kind_that_keeps_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    to_toy = Change("strategy.kind", "ring", "toy", Mark.MEANING)
    assert not keeps_bits(to_toy)
    monkeypatch.setitem(resolved.SAME_BITS, "ring", frozenset({"toy"}))
    assert keeps_bits(to_toy)
    assert not keeps_bits(Change("strategy.kind", "toy", "ring", Mark.MEANING))
    assert not keeps_bits(Change("task", "ring", "toy", Mark.MEANING))


@pytest.mark.parametrize(("strategy", "is_broken"), [("ring", True), ({"kind": "ring"}, True), ("toy", False)])
def test_the_kind_says_whether_each_worker_hosts_a_lane(strategy: Any, is_broken: bool) -> None:
    job = {"workers": 3, "lanes": 2, "strategy": strategy}
    assert bool([*rules._workers_fit_lanes(job, lambda _: "")]) is is_broken
