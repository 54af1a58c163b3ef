"""What `strategy.compress` may say, and what it does not go with."""

from typing import Any

import pytest

from quorate.core.errors import JobFileError
from quorate.spec import rules
from quorate.spec.changes import refused_on_resume
from quorate.spec.job import JobSpec
from quorate.spec.load import resolve_mapping

PLAIN: dict[str, Any] = {"task": "a.py:A", "batch_size": 8, "steps": 1}
RING = {"kind": "ring", "compress": {"bits": 8}}
SERVERS = {"kind": "parameter-server", "compress": {"bits": 8}}
FORGETFUL = {"bits": 8, "feedback": False}


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"strategy": RING | {"compress": {}}}, "strategy.compress", "neither top_k nor bits is given"),
        ({"strategy": SERVERS | {"compress": {"bits": 8, "top_k": 0.1}}}, "strategy.compress", "top_k and bits are"),
        (
            {"strategy": SERVERS | {"mode": "asynchronous"}},
            "strategy.compress",
            "in mode: asynchronous gradients travel whole",
        ),
        ({"strategy": RING, "precision": "fp16"}, "precision", "not possible with strategy.compress"),
        (
            {"strategy": RING, "engine": {"kind": "ray", "address": "a:1", "per_worker": {"gpu": 0.5}}},
            "engine.per_worker.gpu",
            "compress",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_told(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(JobFileError) as raised:
        rules.checked_job(PLAIN | keys)
    (problem,) = (each for each in raised.value.problems if each.path == path)
    assert words in problem.text


@pytest.mark.parametrize(
    ("key", "told"), [("random_k", "use top_k, which sends"), ("momentum", "use the momentum of the optimizer")]
)
def test_a_key_that_is_gone_says_what_to_use(key: str, told: str) -> None:
    """Runs of earlier versions have null there, and go on."""
    job = PLAIN | {"task": "builtins:object"}
    before = resolve_mapping(job | {"strategy": RING | {"compress": {"bits": 8, key: None}}}, "a test", {}, [])
    assert before.spec == resolve_mapping(job | {"strategy": RING}, "a test", {}, []).spec
    with pytest.raises(JobFileError, match=f"{key}: there is no such key.* It was removed: {told}"):
        resolve_mapping(job | {"strategy": RING | {"compress": {key: 0.5}}}, "a test", {}, [])


@pytest.mark.parametrize(
    ("before", "after", "keeps"),
    [
        ({"kind": "ddp"}, RING, False),
        ({"kind": "ring"}, SERVERS, False),
        # Servers feed back what they have not told, which the ring has no word for.
        (RING, SERVERS, False),
        (RING | {"compress": FORGETFUL}, SERVERS | {"compress": FORGETFUL}, True),
        (SERVERS | {"servers": 2}, SERVERS | {"servers": 3}, True),
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
