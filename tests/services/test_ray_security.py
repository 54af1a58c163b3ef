"""A Ray cluster with a token and TLS, as the example has it: a job trains there, and nobody else gets in."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.util

from benchmarks.ray_nodes import RayNodes
from examples.example_files import ROOT
from services.ray_training import ON_RAY, Training, write_job

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
    assert "Its certificate is not of the authority in RAY_TLS_CA_CERT" in refusal
    del others["RAY_TLS_CA_CERT"]  # the cluster is believed, and does not believe this one
    refusal = Training(job, {**nodes.environment, **others}, *ON_RAY).refusal()
    assert "It refuses the certificate in RAY_TLS_SERVER_CERT" in refusal


def test_another_token_is_refused(job: Path, nodes: RayNodes) -> None:
    refusal = Training(job, {**nodes.environment, "RAY_AUTH_TOKEN": "another" * 5}, *ON_RAY).refusal()
    assert "RAY_AUTH_TOKEN is set here, and has to be the cluster's own" in refusal
