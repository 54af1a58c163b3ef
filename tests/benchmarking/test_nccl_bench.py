"""The bench of collectives: who takes part, by how many GPUs there are, and what the times come to."""

import json

import pytest

from benchmarks.allreduce import SHM
from benchmarks.nccl import GLOO, NCCL, Nccl
from benchmarks.row import Row
from benchmarks.run import Options, measure
from quorate.core.errors import RequestError
from schemas import validate


@pytest.mark.parametrize(
    ("gpus", "processes", "words"),
    [
        (0, {"quorate-shm": 2, "gloo": 2}, "No GPU here: NCCL is not measured"),
        (1, {"quorate-shm": 2, "gloo": 2, "nccl": 1}, "One GPU here: NCCL has nobody to exchange with"),
        (4, {"quorate-shm": 4, "gloo": 4, "nccl": 4}, "NCCL on 4 GPUs"),
    ],
)
def test_nccl_takes_a_process_for_each_gpu_and_what_cannot_be_measured_is_said(
    gpus: int, processes: dict[str, int], words: str
) -> None:
    bench = Nccl([2**20], gpus=gpus)
    assert {turn.system.name: turn.order["processes"] for turn in bench.turns()} == processes
    assert words in bench.headline


def test_nccl_alone_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.nccl.gpus_here", lambda: ())
    with pytest.raises(RequestError, match="no GPU"):
        Nccl.here([2**20], [NCCL], None)
    assert [turn.system for turn in Nccl.here([2**20], [SHM, GLOO], None).turns()] == [SHM, GLOO]


@pytest.mark.parametrize(
    ("case", "processes", "expected"),
    [
        ("all_reduce, 1 MB", 4, 1.5),
        ("1 MB", 4, 1.5),
        ("all_gather, 1 MB", 4, 0.75),
        ("reduce_scatter, 1 MB", 2, 0.5),
        ("broadcast, 1 MB", 4, 1.0),
        ("all_reduce, 1 MB", 1, 1.0),
    ],
)
def test_bandwidth_is_what_each_process_must_send(case: str, processes: int, expected: float) -> None:
    row = Row("nccl", case, "gloo", processes, 1, 10**6, 1.0, (1.0,))
    (explained,) = Nccl([10**6]).explained([row])
    assert explained.details["gb_per_second"] == pytest.approx(expected)


@pytest.mark.long
def test_every_collective_of_gloo_is_measured_and_right() -> None:
    report = measure(Nccl([1024], (GLOO,), repeats=2), Options(rounds=1))
    assert not report.absences
    cases = {line.row.case for line in report.lines}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    assert cases == {f"{kind}, {size}" for kind in kinds for size in ("4 B", "1 KB")}
    shares = [line.row.details["step_percent"] for line in report.lines if line.row.case.startswith("all_reduce")]
    assert all(0 < share < 100 for share in shares)
    validate("bench", json.loads(json.dumps(report.to_document())))
