"""Jobs on a Ray cluster whose storage is an object store: no folder is shared, and a real S3 server has the rest."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray_nodes import RayNodes
from command import await_condition
from object_store import BUCKET, SeaweedStore, s3, seaweed
from quorate.stores.objects import FsspecStore
from services.ray_training import ON_RAY, PATIENCE, Training, write_job

__all__ = ["s3", "seaweed"]


@pytest.fixture(scope="module")
def nodes(seaweed: SeaweedStore) -> Iterator[RayNodes]:
    """Nodes have the credentials, as machines of a cloud have."""
    cluster = RayNodes(2, 2, variables=seaweed.environment)
    yield cluster
    cluster.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, "checkpoint: {every: 10}\nworkers: 2")


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory, nodes: RayNodes) -> str:
    job = write_job(tmp_path_factory.mktemp("local"))
    return str(Training(job, nodes.environment, "--workers", "1").result()["weights_digest"])


def quorate(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "quorate", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def test_a_run_in_a_store_has_the_bits_of_one_machine_and_goes_on_elsewhere(
    job: Path, nodes: RayNodes, s3: SeaweedStore, digest: str, tmp_path: Path
) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}"
    slow = ["--set", f"params.go={tmp_path / 'go'}", "--set", "params.pause=0.5"]
    training = Training(job, nodes.environment, *ON_RAY, "--set", f"engine.storage={place}", *slow)
    try:
        saved = training.await_event("checkpoint")
        assert saved[0]["parts"] == 2, "each host has written its own"
        training.interrupt()
    finally:
        training.end()
    (run,) = [folder for folder in (tmp_path / "runs").iterdir() if (folder / "storage.json").exists()]
    store = FsspecStore(f"{place}/{run.name}")
    found = store.list()
    assert {"job.yaml", "environment.json", "events.jsonl", "coordinators/1", "owner"} <= found.keys()
    assert found["events.jsonl"].bytes == (run / "events.jsonl").stat().st_size
    assert "step-00000010/manifest.json" in found
    assert not [key for key in found if key.startswith(".")], "nothing of a save or of a check is left"
    listed = quorate(nodes.environment, "checkpoints", "verify", str(run))
    assert listed

    shutil.rmtree(run)  # with the machine that it was started on
    (tmp_path / "go").touch()
    runs = tmp_path / "elsewhere"
    again = quorate(nodes.environment, "resume", f"{place}/{run.name}", "--runs", str(runs))
    assert again["weights_digest"] == digest
    assert "coordinators/2" in store.list(), "a coordinator that still lived behind a cut cable would be fenced"
    assert b'"status": "complete"' in store.read("result.json")


def test_of_a_store_that_cannot_be_reached_it_is_told_before_anything_begins(
    job: Path, nodes: RayNodes, s3: SeaweedStore
) -> None:
    training = Training(job, nodes.environment, *ON_RAY, "--set", "engine.storage=s3://no-such-bucket/here")
    assert "there is no bucket 'no-such-bucket'" in training.refusal()


def test_a_killed_launcher_is_followed_by_one_elsewhere_from_the_newest_checkpoint(
    job: Path, nodes: RayNodes, s3: SeaweedStore, digest: str, tmp_path: Path
) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}"
    slow = ["--set", f"params.go={tmp_path / 'go'}", "--set", "params.pause=0.5"]
    training = Training(job, nodes.environment, *ON_RAY, "--set", f"engine.storage={place}", *slow)
    training.await_event("checkpoint")
    training.end()
    (tmp_path / "go").touch()
    (name,) = FsspecStore(place).names()
    await_condition("the job to be mirrored", lambda: "job.yaml" in FsspecStore(f"{place}/{name}").list(), PATIENCE)
    again = quorate(nodes.environment, "resume", f"{place}/{name}", "--runs", str(tmp_path / "elsewhere"))
    assert again["weights_digest"] == digest
    assert again["from_step"] >= 10
