"""The GPU benchmark without a GPU: its jobs, its loops, one row as it runs, and how figures are held against each
other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import FREE, QUORATE, RESNET, ROWS, SAVING, SMOKE, Gpu, lanes_case
from benchmarks.own.attention import TINY, measured
from benchmarks.own.device_exchange import READS
from benchmarks.own.gpu_job import CACHES, GpuRun
from benchmarks.peers.gpu_loops import LOOPS, Bout
from benchmarks.raw_images import sharded
from benchmarks.row import Row
from benchmarks.run import Options, measure
from benchmarks.target import judge
from benchmarks.targets import TARGETS
from quorate.spec.job import JobSpec
from schemas import validate


def bench(tmp_path: Path, *rows: str, smoke: bool = True) -> Gpu:
    return Gpu(rows, tmp_path / "kept", smoke, 0, SMOKE)


@pytest.mark.parametrize("smoke", [True, False])
def test_every_row_has_jobs_that_are_in_order(tmp_path: Path, smoke: bool) -> None:
    turns = bench(tmp_path, *ROWS, smoke=smoke).turns()
    assert {turn.system.name for turn in turns} >= {*LOOPS, QUORATE.name, FREE.name}
    for turn in turns:
        if "job" in turn.order:
            JobSpec.model_validate(turn.order["job"])
        assert json.loads(json.dumps(turn.order)) == turn.order


def test_what_several_rows_need_is_measured_once(tmp_path: Path) -> None:
    both, alone = bench(tmp_path, "lanes", "checkpoint").turns(), bench(tmp_path, "checkpoint").turns()
    assert len(alone) == 2
    assert alone[0] in both
    assert len(both) == len(bench(tmp_path, "lanes").turns()) + 1


@pytest.mark.long
@pytest.mark.parametrize("loop", ["hand-compiled", "hand-captured", "hand-ddp", "lightning-by-hand"])
def test_every_loop_takes_all_its_steps(tmp_path: Path, loop: str) -> None:
    turns = [*bench(tmp_path, "resnet50", "transformers", "gangs").turns()]
    orders = [turn.order for turn in turns if turn.system.name == loop]
    assert orders
    for order in orders[-1:]:
        bout = Bout(order | {"folder": str(tmp_path)})
        LOOPS[loop](bout)
        assert bout.laps.seconds.keys() == set(bout.blocks.ends)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_is_timed_by_its_events_and_leaves_only_what_is_kept(tmp_path: Path) -> None:
    report = measure(bench(tmp_path, "checkpoint"), Options(rounds=1, output=tmp_path / "figures.json"))
    assert report.absences == []
    assert [line.row.system for line in report.lines] == [QUORATE.name, QUORATE.name]
    for line in report.lines:
        assert line.row.details["samples_per_second"] == pytest.approx(16_000 / line.row.details["mean_ms"])
    assert "slower_percent" in report.lines[1].row.details
    assert {judgement.verdict for judgement in report.judgements} == {"not measured"}, "this was only a rehearsal"
    assert list((tmp_path / "kept" / "runs").iterdir()) == []
    document = json.loads((tmp_path / "figures.json").read_text())
    validate("bench", document)
    assert len(document["rows"]) == 2


def test_a_job_keeps_its_compiled_kernels_where_it_would_for_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (turn, *_) = bench(tmp_path, "checkpoint").turns()
    for name in CACHES:
        monkeypatch.setenv(name, "/elsewhere")
    run, seen = GpuRun(turn.order | {"folder": str(tmp_path)}, turn.order["job"]), tmp_path / "seen"
    run.complete([sys.executable, "-c", f"import json, os; json.dump(dict(os.environ), open({str(seen)!r}, 'w'))"])
    assert not json.loads(seen.read_text()).keys() & set(CACHES)


@pytest.mark.long
def test_an_exchange_is_held_against_staging_and_outlives_a_kill(tmp_path: Path) -> None:
    report = measure(bench(tmp_path, "exchange"), Options(rounds=1))
    assert report.absences == []
    (line,) = report.lines
    assert line.row.details["of_staged"] == pytest.approx(line.row.details["staged_ms"] / line.row.ms)
    assert line.row.details["reads_over_a_kill"] >= 2 * READS


@pytest.mark.parametrize("has_columns", [True, False])
def test_images_are_written_to_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_columns: bool) -> None:
    monkeypatch.setattr("benchmarks.raw_images.has_pyarrow", lambda: has_columns)
    (turn,) = bench(tmp_path, "busy").turns()
    job = sharded(turn.order["job"], tmp_path, 20)
    (made,) = (path for path in tmp_path.iterdir() if path.name.startswith("images-"))
    before = made.stat().st_mtime_ns
    assert sharded(turn.order["job"], tmp_path, 20) == job
    assert made.stat().st_mtime_ns == before
    training, _ = Bout(turn.order | {"job": job, "folder": str(tmp_path)}).task.datasets()
    assert len(training) == 20
    assert training.index.kind == ("parquet" if has_columns else "tar")
    image, label = training[0]
    assert image.shape == (3, 32, 32)
    assert label >= 0


def row(system: str, case: str, ms: float, **details: float) -> Row:
    return Row("gpu", case, system, 1, 1, None, ms, (ms,), details={"mean_ms": ms, **details})


def judged(rows: list[Row]) -> dict[str, Any]:
    explained = Gpu(list(ROWS), Path()).explained(rows)
    return {each.target.text: each for each in judge(TARGETS, "gpu", explained, 16)}


def test_speed_is_held_against_the_better_loop() -> None:
    rows = [row("quorate", RESNET, 40.0), row("hand-compiled", RESNET, 41.0), row("hand-captured", RESNET, 39.0)]
    found = judged([*rows, row("lightning-by-hand", RESNET, 110.0), row("accelerate", RESNET, 104.0)])
    assert found["ResNet-50: % of the better hand-tuned loop"].value == pytest.approx(97.5)
    assert found["ResNet-50: times as fast as Lightning and accelerate"].value == pytest.approx(2.6)
    assert found["ResNet-50: times as fast as Lightning and accelerate"].verdict == "missed"


def test_a_gang_of_one_is_held_against_the_ring_and_against_plain_ddp() -> None:
    found = judged([row("quorate", RESNET, 40.0), row("quorate-ddp", RESNET, 42.0), row("hand-ddp", RESNET, 41.0)])
    assert found["ResNet-50, `strategy: ddp`: % of one lane of the ring"].value == pytest.approx(100 * 40 / 42)
    assert found["ResNet-50, `strategy: ddp`: % of plain compiled DDP"].value == pytest.approx(100 * 41 / 42)
    assert found["ResNet-50: % of the better hand-tuned loop"].verdict == "not measured"


def test_lanes_and_saves_are_held_against_the_plain_job() -> None:
    rows = [row("quorate", RESNET, 40.0), row("quorate", lanes_case(4), 50.0), row("quorate", SAVING, 40.2)]
    found = judged(rows)
    assert found["ResNet-50, 4 lanes: % of one lane"].value == pytest.approx(80.0)
    assert found["ResNet-50, a checkpoint every 50 steps: % slower"].value == pytest.approx(0.5)
    assert found["ResNet-50, 2 lanes: % of one lane"].verdict == "not measured"


CPU = torch.device("cpu")


def test_what_there_is_repeats_and_is_measured() -> None:
    told = measured("math", TINY[0], CPU, strict=True)
    assert told["repeats"]
    assert told["ms"] > 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_there_is_not_is_told_with_its_reason() -> None:
    assert "No viable backend" in measured("efficient", TINY[0], CPU, strict=True)["absent"]
