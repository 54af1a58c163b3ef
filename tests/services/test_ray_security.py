"""A Ray cluster with a token and TLS, as the example has it: a job trains there, and nobody else gets in. Of one
without a token people are warned."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.util

from benchmarks.ray_nodes import RayNodes
from examples.example_files import ROOT
from services.ray_training import ON_RAY, PATIENCE, Training, write_job

SCRIPT = ROOT / "scripts" / "ray_certificates.sh"
TLS = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def certificates(folder: Path) -> dict[str, str]:
    """An authority of one's own, and what processes of this machine have to know of it."""
    host = ray.util.get_node_ip_address()
    subprocess.run(["sh", str(SCRIPT), str(folder), host], check=True)
    files = (folder / f"{host}.pem", folder / f"{host}.key", folder / "ca.pem")
    return {"RAY_USE_TLS": "1", **{name: str(file) for name, file in zip(TLS, files, strict=True)}}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    cluster = RayNodes(2, 2, variables=certificates(tmp_path_factory.mktemp("certificates")))
    yield cluster
    cluster.close()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, "workers: 2", lanes=2, steps=10)


def test_a_job_trains_on_two_nodes_with_a_token_and_tls(job: Path, nodes: RayNodes) -> None:
    local = Training(job, nodes.environment).result()
    trained = Training(job, nodes.environment, *ON_RAY).result()
    assert trained["weights_digest"] == local["weights_digest"]
    logged = "".join(file.read_text() for file in job.parent.glob("runs/*/logs/worker-*.jsonl"))
    assert "different hosts" in logged, "both nodes took part"


def test_who_speaks_no_tls_is_refused_and_told_why(job: Path, nodes: RayNodes) -> None:
    plain = {key: value for key, value in nodes.environment.items() if key not in ("RAY_USE_TLS", *TLS)}
    refusal = Training(job, plain, *ON_RAY).refusal()
    assert "RAY_USE_TLS" in refusal


def test_certificates_of_another_authority_are_refused(job: Path, nodes: RayNodes, tmp_path: Path) -> None:
    others = certificates(tmp_path / "others")
    refusal = Training(job, {**nodes.environment, **others}, *ON_RAY).refusal()
    assert "it answers, but not to this process" in refusal and "of the cluster's own authority" in refusal
    del others["RAY_TLS_CA_CERT"]  # the cluster is believed, and does not believe this one
    refusal = Training(job, {**nodes.environment, **others}, *ON_RAY).refusal()
    assert "it answers, but not to this process" in refusal and "of the cluster's own authority" in refusal


def test_another_token_is_refused(job: Path, nodes: RayNodes) -> None:
    refusal = Training(job, {**nodes.environment, "RAY_AUTH_TOKEN": "another" * 5}, *ON_RAY).refusal()
    assert "RAY_AUTH_TOKEN is set here, and has to be the cluster's own" in refusal


def without_token(environment: dict[str, str], home: Path) -> dict[str, str]:
    """Of a user who has none: neither in the environment nor at home."""
    home.mkdir()
    left = {key: value for key, value in environment.items() if not key.startswith("RAY_AUTH_")}
    return {**left, "HOME": str(home)}


def test_a_missing_token_is_named_with_the_remedy_and_one_that_ray_does_not_show_too(
    job: Path, nodes: RayNodes, tmp_path: Path
) -> None:
    bare = without_token(nodes.environment, tmp_path / "home")
    refusal = " ".join(Training(job, bare, *ON_RAY).refusal().split())
    assert "asks for a token: RAY_AUTH_TOKEN is not set here" in refusal
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to it" in refusal
    assert "there is no Ray cluster" not in refusal
    doctor = [sys.executable, "-m", "quorate", "doctor", "--engine", "ray", "--address", bare["RAY_ADDRESS"]]
    asked = subprocess.run(doctor, env=bare, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert asked.returncode == 1 and "asks for a token: RAY_AUTH_TOKEN is not set here" in asked.stdout, asked
    file = tmp_path / "home" / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(nodes.environment["RAY_AUTH_TOKEN"])
    refusal = " ".join(Training(job, bare, *ON_RAY).refusal().split())
    assert "~/.ray/auth_token is there, and not used, since RAY_AUTH_MODE is not set" in refusal
    # With it, the file at home is enough.
    assert Training(job, {**bare, "RAY_AUTH_MODE": "token"}, *ON_RAY).result()["status"] == "complete"


def test_on_a_cluster_that_lets_everybody_in_a_job_trains_with_one_warning(job: Path, tmp_path: Path) -> None:
    cluster = RayNodes(2, variables={"RAY_AUTH_MODE": "disabled"})
    try:
        for environment in (cluster.environment, without_token(cluster.environment, tmp_path / "home")):
            trained = Training(job, environment, *ON_RAY)
            assert trained.result()["status"] == "complete"
            warnings = [line for line in trained.errors.splitlines() if "asks for no token" in line]
            assert len(warnings) == 1, trained.errors
            assert "ray get-auth-token --generate" in warnings[0] and "RAY_AUTH_MODE=token" in warnings[0]
    finally:
        cluster.close()


def test_a_job_with_a_ray_of_its_own_leaves_no_token_at_home_and_has_one(job: Path, tmp_path: Path) -> None:
    environment = without_token(dict(os.environ), tmp_path / "home")
    trained = Training(job, environment, *ON_RAY, "--set", "engine.address=local")
    assert trained.result()["status"] == "complete"
    assert not (tmp_path / "home" / ".ray").exists()
    assert "asks for no token" not in trained.errors
