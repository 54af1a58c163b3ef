"""`quorate doctor` on a cluster of two nodes, both of this machine."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray._private.utils as ray_utils
from ray.cluster_utils import Cluster

from quorate.doctor.cluster import NodeProbe, judge, read_cluster
from quorate.doctor.report import Level

pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("default")]

AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def small(cpus: int) -> dict[str, Any]:
    """Of a node. Its agents are told their ports: to wait until they have told theirs, Ray has no patience."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in AGENTS]
        ports = {name: server.getsockname()[1] for name, server in zip(AGENTS, held, strict=True)}
    return {"num_cpus": cpus, "object_store_memory": 80 * 2**20, "include_dashboard": False, **ports}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted"))
        nodes = Cluster(initialize_head=True, head_node_args=small(1))
        try:
            nodes.add_node(**small(2))
            yield nodes
        finally:
            nodes.shutdown()


def test_two_nodes_of_one_machine_are_well(cluster: Cluster, tmp_path: Path) -> None:
    reading = read_cluster(cluster.address, str(tmp_path))
    assert [dict(node.resources)["CPU"] for node in reading.nodes].count(1.0) == 1
    assert len(reading.nodes) == 2 and len(reading.ways) == 2
    assert all(way.bytes_per_second > 0 for way in reading.ways)
    found = judge(reading, NodeProbe().versions())
    assert [finding for finding in found if finding.level is Level.PROBLEM] == []
    assert list(tmp_path.iterdir()) == []
