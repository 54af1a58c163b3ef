"""Jobs on a Ray cluster of three nodes: the bits of one machine, also when nodes are lost and added."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ray_nodes import RayNodes
from services.ray_training import ON_RAY, STEPS, STRATEGIES, TASK, Training, write_job


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2, 2)
    yield cluster
    cluster.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, "checkpoint: {every: 10}")


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory, nodes: RayNodes) -> str:
    job = write_job(tmp_path_factory.mktemp("local"))
    return str(Training(job, nodes.environment, "--workers", "1").result()["weights_digest"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_bits_are_those_of_one_machine(
    job: Path, nodes: RayNodes, digest: str, strategy: str, workers: int
) -> None:
    options = [*ON_RAY, "--workers", str(workers), *STRATEGIES[strategy]]
    training = Training(job, nodes.environment, *options)
    result = training.result()
    assert result["weights_digest"] == digest
    assert result["recoveries"] == []
    logged = "".join(file.read_text() for file in job.parent.glob("runs/*/logs/worker-*.jsonl"))
    if workers > 1 and strategy == "ring":
        assert "different hosts" in logged, "what hosts log comes to the run's folder"


def test_a_node_is_killed_and_another_is_added(job: Path, nodes: RayNodes, digest: str) -> None:
    go = job.parent / "go"
    options = [*ON_RAY, "--workers", "3", "--set", "params.pause=3", "--set", f"params.go={go}"]
    training = Training(job, nodes.environment, *options, "--set", "engine.placement=strict_spread")
    training.await_event("step", 3)
    nodes.kill_last()
    (lost,) = training.await_event("lost")
    steps = len(training.events("step"))
    training.await_event("step", steps + 2)
    nodes.add(2)
    formed = training.await_event("generation", 3)
    assert len(formed[1]["members"]) == 2, "the survivors went on"
    assert len(formed[2]["members"]) == 3, "the new node is used"
    go.touch()
    result = training.result()
    assert result["weights_digest"] == digest
    assert [one["worker"] for one in result["recoveries"]] == [lost["worker"]]


def test_a_node_that_is_about_to_be_taken_away_is_left_at_the_end_of_a_step(
    job: Path, nodes: RayNodes, digest: str
) -> None:
    go = job.parent / "go"
    options = [*ON_RAY, "--workers", "3", "--set", "params.pause=3", "--set", f"params.go={go}"]
    training = Training(job, nodes.environment, *options, "--set", "engine.placement=strict_spread")
    training.await_event("step", 3)
    nodes.drain_last(300)
    formed = training.await_event("generation", 2)
    assert len(formed[1]["members"]) == 2, "the others go on without it"
    nodes.kill_last()
    nodes.add(2)
    formed = training.await_event("generation", 3)
    assert len(formed[2]["members"]) == 3, "the new node is used"
    go.touch()
    result = training.result()
    assert result["weights_digest"] == digest
    assert training.events("lost") == [], "it left in time"
    assert result["recoveries"] == []


def test_an_import_that_fails_is_told_before_a_place_is_taken(job: Path, nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import a_module_that_is_not_there\n")
    job.write_text(job.read_text().replace(f"{TASK}:Small", f"{tmp_path}/task.py:Small"))
    refusal = Training(job, nodes.environment, *ON_RAY).refusal()
    assert "engine: {runtime_env: {pip: [a_module_that_is_not_there]}}" in refusal
    assert not list(job.parent.glob("runs/*/logs/worker-*")), "nobody was started"


def test_checkpoints_and_events_are_in_the_storage_and_the_run_leads_there(
    job: Path, nodes: RayNodes, digest: str, tmp_path: Path
) -> None:
    storage = tmp_path / "shared"
    storage.mkdir()
    options = [*ON_RAY, "--workers", "2", "--set", f"engine.storage={storage}"]
    training = Training(job, nodes.environment, *options)
    assert training.result()["weights_digest"] == digest
    (run,) = job.parent.glob("runs/*")
    assert (storage / run.name / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    assert (run / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    assert training.events("step")


def test_where_there_is_no_cluster_the_remedy_is_told(job: Path, nodes: RayNodes) -> None:
    training = Training(job, nodes.environment, "--set", "engine=ray", "--set", "engine.address=127.0.0.1:1")
    refusal = training.refusal()
    assert "there is no Ray cluster at 127.0.0.1:1" in refusal
    assert "ray start --head" in refusal
