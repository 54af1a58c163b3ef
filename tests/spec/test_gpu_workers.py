"""How many workers a machine with GPUs gets, and what is said of GPUs that nobody uses."""

import re
from typing import Any

import pytest

from quorate.core.generation import server_id
from quorate.spec.device import gpu_of, idle_gpus, workers_here
from quorate.spec.job import JobSpec


def job(**keys: Any) -> JobSpec:
    return JobSpec.model_validate({"task": "task.py:Task", "batch_size": 64, "steps": 1, **keys})


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.spec.device.gpus_here", lambda: tuple(map(str, range(request.param))))
    monkeypatch.setattr("quorate.spec.device.torch_has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("gpus", "keys", "count"),
    [
        (0, {}, 8),
        (1, {}, 1),
        (4, {}, 4),
        (4, {"lanes": 2}, 2),
        (1, {"workers": 4}, 4),
        (1, {"min_workers": 2}, 2),
        (4, {"device": "cpu"}, 8),
        (2, {"strategy": "parameter-server"}, 2),
        (1, {"strategy": {"kind": "parameter-server", "mode": "asynchronous"}}, 8),
        (0, {"device": "cuda"}, 1),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_auto_is_one_worker_for_each_gpu(keys: dict[str, Any], count: int) -> None:
    assert workers_here(job(**keys), cores=16) == count


@pytest.mark.parametrize(
    ("gpus", "keys", "words"),
    [
        (4, {"lanes": 1}, "3 of 4 GPUs stay idle: .* `lanes: 1` allows no more workers. `lanes: 4` does"),
        (2, {"lanes": 1}, "1 of 2 GPUs stays idle"),
        (4, {"lanes": 8, "workers": 2}, "2 of 4 GPUs stay idle: .* there are 2. `--workers 4` uses more"),
        (
            4,
            {"workers": 1, "strategy": "parameter-server"},
            "2 of 4 GPUs stay idle: each worker and server .* there are 2. `--workers 3` uses more",
        ),
        (1, {"strategy": {"kind": "ring", "compress": {"bits": 8}}}, "1 GPU stays idle: strategy.compress computes on"),
        (2, {"strategy": {"kind": "parameter-server", "mode": "asynchronous"}}, "2 GPUs stay idle: strategy.mode"),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_gpus_that_stay_idle_are_named_with_the_reason(keys: dict[str, Any], words: str) -> None:
    spec = job(**keys)
    assert re.match(words, idle_gpus(spec, workers_here(spec, cores=16)) or "")


@pytest.mark.parametrize(
    ("gpus", "keys"),
    [
        (0, {}),
        (1, {"lanes": 1}),
        (4, {}),
        (4, {"device": "cpu", "workers": 1}),
        (2, {"lanes": 1, "strategy": "parameter-server"}),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_where_all_are_used_or_none_was_to_be_nothing_is_said(keys: dict[str, Any]) -> None:
    spec = job(**keys)
    assert idle_gpus(spec, workers_here(spec, cores=16)) is None


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_workers_and_servers_are_spread_over_the_gpus(gpus: int) -> None:
    for workers in range(1, 10):
        for servers in range(10):
            members = [*range(workers), *map(server_id, range(servers))]
            shares = [sum(gpu_of(member, gpus) == gpu for member in members) for gpu in range(gpus)]
            assert max(shares) == -(-len(members) // gpus), "as batch_size: auto takes it to be"
