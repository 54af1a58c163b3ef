"""Keys that do nothing for a job are told."""

from typing import Any

import pytest

import gang
from bits.bit_tasks import Adam
from quorate.replica.replica import Replica
from quorate.strategies.kinds import strategy_factory
from quorate.task.task import configure


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"strategy": "ddp", "nccl": {"debug": "INFO"}},
            "nccl (debug) does nothing here: this job computes on the host",
        ),
        ({"strategy": "ddp"}, ""),
    ],
)
def test_nccl_keys_of_a_job_that_does_not_use_it(
    keys: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = gang.job(Adam, **keys)
    strategy_factory(spec, Replica(configure(Adam, {}, "test", spec.seed), spec))
    assert [record.getMessage() for record in caplog.records if "nccl" in record.getMessage()] == [why] * bool(why)
