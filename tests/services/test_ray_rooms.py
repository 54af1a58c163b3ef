"""Rooms on a Ray cluster: which GPUs of a node a worker has, told by Ray itself, and what is asked of the autoscaler
for one that there is no room for. The GPUs are only claimed."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.ray_nodes import RayNodes
from services.ray_training import PATIENCE

PROGRAM = f"""
import json, sys, time
import ray
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from quorate.engines.ray.ray_cluster import RayCluster

cluster = RayCluster("auto", "rooms", {{"CPU": 1.0, "GPU": 1.0}})
(node,) = cluster.connect().nodes

def found(*rooms):
    over = time.monotonic() + {PATIENCE}
    while any(room.node() is None for room in rooms) and time.monotonic() < over:
        time.sleep(0.05)
    return [room.gpus for room in rooms]

first, second = cluster.ask_room(node.id, frozenset()), cluster.ask_room(node.id, frozenset())
both = found(first, second)

def asked():
    # What Ray's autoscaler is asked for, by the state that it reads.
    state = get_cluster_resource_state(GcsClient(address=ray.get_runtime_context().gcs_address))
    gangs = state.pending_gang_resource_requests
    return [dict(one.resources_bundle) for gang in gangs for bundles in gang.bundle_selectors
            for one in bundles.resource_requests]

def until(wanted):
    over = time.monotonic() + {PATIENCE}
    while asked() != wanted and time.monotonic() < over:
        time.sleep(0.1)
    return asked()

third = cluster.ask_room(None, frozenset())
waits = third.node() is None
missing = until([{{"CPU": 1.0, "GPU": 1.0}}])
first.release()
had = found(third)
fourth = cluster.ask_room(None, frozenset())
missing += until([{{"CPU": 1.0, "GPU": 1.0}}])
fourth.release()
print(json.dumps([both, waits, had, missing, until([])]))
cluster.close()
"""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes(4, gpus=2)
    yield cluster
    cluster.close()


def test_each_room_has_a_gpu_of_its_own_and_one_that_is_missing_is_asked_of_the_autoscaler(nodes: RayNodes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=nodes.environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    both, waits, third, missing, withdrawn = json.loads(done.stdout.splitlines()[-1])
    assert sorted(both) == ["0", "1"]
    assert waits, "there were only two"
    assert third == both[:1]
    assert missing == 2 * [{"CPU": 1.0, "GPU": 1.0}], "asked of the autoscaler for as long as it is missing"
    assert withdrawn == []
