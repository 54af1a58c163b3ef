"""Gangs on a Ray cluster of two nodes, through Ray Train: the bits of one machine, also when a part of a gang dies."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray_nodes import RayNodes
from command import await_condition
from quorate.observe.events import EvaluationDone, StepCompleted
from quorate.observe.jsonl import JsonlSink
from services.ray_training import PATIENCE, TASK, Training

STEPS = 30
ON_RAY = ["--set", "engine=ray", "--set", "engine.placement=spread"]
FSDP = ["--set", "strategy=fsdp"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2)
    yield cluster
    cluster.close()


def write_job(folder: Path, every: int = 10) -> Path:
    file = folder / "job.yaml"
    file.write_text(
        f"version: 2\nname: small\ntask: {TASK}:Small\nlanes: 4\nbatch_size: 16\nsteps: {STEPS}\nseed: 5\nworkers: 2\n"
        f"min_workers: 2\nstrategy: ddp\nruns: {folder}/runs\ncheckpoint: {{every: {every}}}\n"
    )
    return file


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory, nodes: RayNodes) -> str:
    job = write_job(tmp_path_factory.mktemp("local"))
    return str(Training(job, nodes.environment).result()["weights_digest"])


@pytest.fixture
def slow(tmp_path: Path, nodes: RayNodes) -> Iterator[tuple[Training, Path]]:
    """A job that takes its time until there is the file."""
    go = tmp_path / "go"
    options = [*ON_RAY, "--set", "params.pause=1", "--set", f"params.go={go}"]
    training = Training(write_job(tmp_path, every=5), nodes.environment, *options)
    yield training, go
    training.end()


def steps_of(training: Training) -> list[int]:
    return [event["step"] for event in training.events("step")]


def logged(training: Training, text: str) -> list[dict[str, Any]]:
    files = [file.read_text() for file in training.job.parent.glob("runs/*/logs/launcher.jsonl")]
    return [json.loads(line) for lines in files for line in lines.splitlines() if text in line]


def test_what_ray_train_is_told_is_the_newest_of_a_runs_events(tmp_path: Path) -> None:
    from quorate.engines.ray.train import Metrics

    file = tmp_path / "events.jsonl"
    with contextlib.closing(JsonlSink(file)) as sink:
        sink.handle(StepCompleted(step=1, losses={"": 7.0}))
        metrics = Metrics(file)
        assert metrics.news() == {}, "what an earlier part of a run has told is not news"
        sink.handle(StepCompleted(step=2, epoch=1, losses={"": 2.0}, samples_per_second=8.0))
        sink.handle(StepCompleted(step=3, epoch=1, losses={"": 1.0}, samples_per_second=9.0))
        sink.handle(EvaluationDone(step=3, metrics={"accuracy": 0.5}))
        told = {"step": 3, "epoch": 1, "loss": 1.0, "samples_per_second": 9.0, "evaluation/accuracy": 0.5}
        assert metrics.news() == told
        assert metrics.news() == {}
        assert metrics.newest == told


def test_the_bits_are_those_of_one_machine(tmp_path: Path, nodes: RayNodes, digest: str) -> None:
    training = Training(write_job(tmp_path), nodes.environment, *ON_RAY)
    result = training.result()
    assert result["weights_digest"] == digest
    assert result["recoveries"] == []
    assert steps_of(training) == list(range(1, STEPS + 1))
    hosts = {record["message"].partition("on host ")[2] for record in logged(training, "is process")}
    assert len(hosts) == 2, "each worker was on a node of its own"
    assert not nodes.processes("ray::RayTrainWorker"), "Ray Train has ended its run"


def test_a_worker_that_is_killed_is_replaced_and_no_step_is_lost(
    slow: tuple[Training, Path], nodes: RayNodes, digest: str
) -> None:
    training, go = slow
    training.await_event("step", 7)
    trainers = {process.pid for process in nodes.processes("ray::RayTrainWorker")}
    pid = int(logged(training, "worker 1 is process")[0]["message"].split("process ")[1].split(",")[0])
    subprocess.run(["kill", "-9", str(pid)], check=True)
    (lost,) = training.await_event("lost")
    training.await_event("generation", 2)
    assert {process.pid for process in nodes.processes("ray::RayTrainWorker")} == trainers, "Ray Train was not troubled"
    go.touch()
    result = training.result()
    assert lost["worker"] == 1
    assert result["weights_digest"] == digest
    assert [one["steps_lost"] for one in result["recoveries"]] == [0]
    assert steps_of(training) == list(range(1, STEPS + 1))


def test_a_process_of_ray_train_is_killed_and_all_begin_again_from_the_checkpoint(
    slow: tuple[Training, Path], nodes: RayNodes, digest: str
) -> None:
    training, go = slow
    training.await_event("step", 7)
    before = nodes.processes("ray::RayTrainWorker")
    assert len(before) == 2
    before[1].kill()
    training.await_event("lost")
    training.await_event("generation", 2)
    go.touch()
    result = training.result()
    assert result["weights_digest"] == digest
    (recovery,) = result["recoveries"]
    assert recovery["steps_lost"] > 0, "they stand in no checkpoint"
    steps = steps_of(training)
    assert sorted(set(steps)) == list(range(1, STEPS + 1)), "no gap"
    assert len(list(training.job.parent.glob("runs/*"))) == 1
    assert len(training.events("lost")) == 1, "one recovery, although both workers were replaced"


def test_a_trainer_of_ray_train_trains_a_job(tmp_path: Path, nodes: RayNodes, digest: str) -> None:
    job = write_job(tmp_path)
    script, heard = tmp_path / "script.py", tmp_path / "heard"
    script.write_text(
        "import json, quorate, ray.train.torch\n"
        "class Heard(ray.train.UserCallback):\n"
        "    def after_report(self, run_context, metrics, checkpoint):\n"
        f"        open({str(heard)!r}, 'a').write(json.dumps([one['step'] for one in metrics]) + '\\n')\n"
        f"trainer = quorate.ray.trainer(quorate.Job.from_file({str(job)!r}), progress=False)\n"
        "assert isinstance(trainer, ray.train.torch.TorchTrainer)\n"
        "assert trainer.scaling_config.num_workers == 2\n"
        "trainer.run_config.callbacks = [Heard()]\n"
        "result = trainer.fit()\n"
        "print(json.dumps({'metrics': result.metrics, 'path': result.path}))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=nodes.environment, timeout=PATIENCE
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["metrics"]["weights_digest"] == digest
    assert result["metrics"]["step"] == STEPS
    assert 0 < result["metrics"]["loss"] < 10
    assert heard.read_text().splitlines()[-1] == f"[{STEPS}, {STEPS}]", "what all workers reported to Ray Train"
    assert (Path(result["path"]) / "events.jsonl").exists()


def test_sharded_workers_begin_again_too(tmp_path: Path, nodes: RayNodes) -> None:
    undisturbed = Training(write_job(tmp_path), nodes.environment, *FSDP).result()
    go = tmp_path / "go"
    options = [*FSDP, *ON_RAY, "--set", "params.pause=1", "--set", f"params.go={go}"]
    (tmp_path / "ray").mkdir()
    training = Training(write_job(tmp_path / "ray", every=5), nodes.environment, *options)
    try:
        training.await_event("step", 7)
        nodes.processes("ray::RayTrainWorker")[0].kill()
        training.await_event("lost")
        training.await_event("generation", 2)
        go.touch()
        assert training.result()["weights_digest"] == undisturbed["weights_digest"]
    finally:
        training.end()


def test_nothing_is_left_of_a_job_that_is_stopped(slow: tuple[Training, Path], nodes: RayNodes) -> None:
    training, _ = slow
    training.await_event("step", 2)
    training.interrupt()
    await_condition("the end of Ray Train's workers", lambda: not nodes.processes("ray::RayTrainWorker") or None, 60.0)


def test_a_gang_saves_and_begins_again_elsewhere_when_a_node_is_about_to_be_taken_away(
    slow: tuple[Training, Path], nodes: RayNodes, digest: str
) -> None:
    """The last of all: the node is not used any more."""
    training, go = slow
    training.await_event("step", 7)
    nodes.drain_last(600)
    training.await_event("generation", 2)
    go.touch()
    result = training.result()
    assert result["weights_digest"] == digest
    assert not training.events("lost"), "nobody was lost: all have left"
    assert steps_of(training) == list(range(1, STEPS + 1)), "no step is done again"
    assert len(training.events("generation")) == 2
