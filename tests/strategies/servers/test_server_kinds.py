"""What a job file may say of parameter servers, and which strategies go on with each other's state."""

from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.spec import rules
from quorate.spec.changes import refused_on_resume
from quorate.spec.job import JobSpec

PLAIN = {"task": "a.py:A", "batch_size": 8, "steps": 1}


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        ({"kind": "ring"}, {"kind": "parameter-server"}, True),
        ({"kind": "parameter-server", "servers": 3}, {"kind": "ring"}, True),
        ({"kind": "ring"}, {"kind": "parameter-server", "mode": "asynchronous"}, False),
        ({"kind": "ddp"}, {"kind": "parameter-server"}, True),
        ({"kind": "ddp"}, {"kind": "parameter-server", "mode": "asynchronous"}, False),
        ({"kind": "parameter-server", "mode": "asynchronous"}, {"kind": "ring"}, False),
    ],
)
def test_a_run_may_go_on_with_servers_that_keep_the_bits(
    before: dict[str, Any], after: dict[str, Any], keeps: bool
) -> None:
    old, new = (
        JobSpec.model_validate({**PLAIN, "lanes": 4, "workers": 2, "min_workers": 2, "strategy": strategy})
        for strategy in (before, after)
    )
    assert (not refused_on_resume(old, new)) is keeps


ASYNCHRONOUS = {"mode": "asynchronous"}


@pytest.mark.parametrize(
    ("strategy", "keys", "path", "words"),
    [
        ({"mode": "bounded"}, {}, "strategy.staleness", ""),
        ({"staleness": 2}, {}, "strategy.staleness", ""),
        ({"damping": True}, {}, "strategy.damping", ""),
        pytest.param(ASYNCHRONOUS, {"average": {"decay": 0.9}}, "average", "", id="an average needs steps"),
        pytest.param(ASYNCHRONOUS, {"balance": "speed"}, "balance", "", id="balance needs steps"),
        # Nobody has the sum of the gradients.
        ({}, {"precision": "fp16"}, "precision", "not possible with strategy: parameter-server"),
        (ASYNCHRONOUS, {"precision": "fp16"}, "precision", "not possible with strategy: parameter-server"),
    ],
)
def test_keys_that_do_not_go_with_servers_are_told(
    strategy: dict[str, Any], keys: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(JobFileError) as raised:
        rules.checked_job({**PLAIN, **keys, "strategy": {"kind": "parameter-server", **strategy}})
    (problem,) = raised.value.problems
    assert problem.path == path
    assert words in problem.text


def test_a_mode_is_told_with_where_it_was_said_and_not_where_its_strategy_was() -> None:
    job = JobSpec.model_validate(PLAIN | {"strategy": {"kind": "parameter-server", "mode": "bounded"}})
    found = rules.broken_rules(job, {"batch_size"}, lambda key: f" (said of {key})")
    texts = {problem.path: problem.text for problem in found}
    assert "bounded (said of strategy.mode)" in texts["strategy.staleness"]
