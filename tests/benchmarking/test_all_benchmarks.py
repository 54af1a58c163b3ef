"""Every benchmark once, with every system that is installed, as short as it can be."""

import json

import pytest

from benchmarks.allreduce import AllReduce
from benchmarks.bench import Bench
from benchmarks.blocks import Blocks
from benchmarks.compress import Compress
from benchmarks.ddp import Ddp
from benchmarks.links import Links
from benchmarks.nccl import Nccl
from benchmarks.overlap import Overlap
from benchmarks.run import Options, measure
from benchmarks.scaling import Scaling
from benchmarks.selection import Crowd
from benchmarks.servers import Servers
from benchmarks.sharded import Sharded
from benchmarks.startup import Startup
from benchmarks.step import Step
from schemas import validate


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bench",
    [
        AllReduce([2, 3], [1024, 2**20], repeats=3),
        Nccl([2**20], repeats=3),
        Servers([1024, 2**20], repeats=3, steps=4, kills=1, rows=1000),
        Step(lengths={"tiny-mlp": Blocks(2, 4), "cnn": Blocks(1, 2)}),
        Startup(),
        Scaling([Crowd(1), Crowd(2), Crowd(2, 2)], lanes=2, steps_per_worker=1),
        Ddp(blocks=Blocks(1, 2), kills=1),
        Sharded(2**24, saves=1),
        Overlap(stretches=1, warm_up=1, steps=2),
        Links(2**20, repeats=3),
        Compress(epochs=1, seeds=(1,), mbit=1000, warm_up=1, steps=2),
    ],
    ids=lambda bench: str(bench.name),
)
def test_every_system_is_measured_or_not_installed(bench: Bench) -> None:
    report = measure(bench, Options(rounds=1))
    absent = {absence.what for absence in report.absences if absence.reason.endswith(("not installed", "missing"))}
    assert [absence for absence in report.absences if absence.what not in absent] == []
    assert {line.row.system for line in report.lines} == {
        system.name for turn in bench.turns() for system in turn.systems
    } - absent
    assert all(line.row.ms > 0 for line in report.lines)
    validate("bench", json.loads(json.dumps(report.to_document())))
