"""Rooms on a Ray cluster: which GPUs of a node a worker has, told by Ray itself. The GPUs are only claimed."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.ray_nodes import RayNodes
from services.test_ray_engine import PATIENCE

PROGRAM = f"""
import json, sys, time
from quorate.engines.ray_cluster import RayCluster

cluster = RayCluster("auto", "rooms", {{"CPU": 1.0, "GPU": 1.0}})
(node,) = cluster.connect().nodes

def found(*rooms):
    over = time.monotonic() + {PATIENCE}
    while any(room.node() is None for room in rooms) and time.monotonic() < over:
        time.sleep(0.05)
    return [room.gpus for room in rooms]

first, second = cluster.ask_room(node.id, frozenset()), cluster.ask_room(node.id, frozenset())
both = found(first, second)
third = cluster.ask_room(None, frozenset())
waits = third.node() is None
first.release()
print(json.dumps([both, waits, found(third)]))
cluster.close()
"""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(4, gpus=2)
    yield cluster
    cluster.close()


def test_each_room_has_a_gpu_of_its_own_and_the_next_has_the_one_that_was_given_back(nodes: RayNodes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=nodes.environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    both, waits, third = json.loads(done.stdout.splitlines()[-1])
    assert sorted(both) == ["0", "1"]
    assert waits, "there were only two"
    assert third == both[:1]
