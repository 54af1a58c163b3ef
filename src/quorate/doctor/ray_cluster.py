"""The readings of a Ray cluster: one probe on each node, which it cannot leave. Imports Ray, so only when asked."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.core.addresses import is_url
from quorate.core.errors import RequestError
from quorate.doctor import node_probe
from quorate.doctor.cluster import ClusterReading, NodeReading, WayReading
from quorate.engines.ray.connection import refuse_wrong_token, warn_without_token

PATIENCE = 60.0
SENT = 32 * 2**20
ROUNDS = 5


def read_cluster(address: str, storage: str | None) -> ClusterReading:
    """Look at each node, at the way between every two, and for the storage on each."""
    with _connected(address):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        # By value: a node without Quorate can tell that it has none.
        ray.cloudpickle.register_pickle_by_value(node_probe)
        try:
            make = ray.remote(node_probe.NodeProbe)
            probes = {node["NodeID"]: _placed(make, node["NodeID"]) for node in nodes}
        finally:
            ray.cloudpickle.unregister_pickle_by_value(node_probe)
        readings = {node["NodeID"]: _read(node, probes[node["NodeID"]]) for node in nodes}
        heard = [node for node in nodes if not readings[node["NodeID"]].trouble]
        if storage is not None:
            _look_for_storage(storage, readings, {one["NodeID"]: probes[one["NodeID"]] for one in heard})
        return ClusterReading(tuple(readings.values()), _ways(heard, probes, readings), storage)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    refuse_wrong_token(address, "--address")
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RequestError(
            f"no cluster answers at {address}: {said} Start one with `ray start --head`, or name another: --address."
        ) from error
    try:
        warn_without_token()
        yield
    finally:
        ray.shutdown()


def _placed(make: Any, node: str) -> Any:
    return make.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _read(node: Mapping[str, Any], probe: Any) -> NodeReading:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"
    resources = {key: float(value) for key, value in node["Resources"].items()}
    try:
        facts = ray.get(probe.facts.remote(), timeout=PATIENCE)
        round_trip, offset = min(_offsets(probe))
    except ray.exceptions.RayError as error:
        return NodeReading(name, resources=resources, trouble=_in_short(error))
    return NodeReading(name, facts["versions"], resources, offset, round_trip)


def _offsets(probe: Any) -> Iterator[tuple[float, float]]:
    """Round trips, and how far its clock was ahead if both ways took as long: the shortest tells best."""
    for _ in range(ROUNDS):
        began = time.time()
        there = ray.get(probe.clock.remote(), timeout=PATIENCE)
        ended = time.time()
        yield ended - began, there - (began + ended) / 2


def _ways(
    nodes: Sequence[Mapping[str, Any]], probes: Mapping[str, Any], readings: Mapping[str, NodeReading]
) -> tuple[WayReading, ...]:
    """One after the other: two at a time would share what the network has."""
    ways = []
    listening: dict[str, Any] = {}
    for sender, receiver in permutations(nodes, 2):
        there, here = receiver["NodeID"], sender["NodeID"]
        names = readings[here].name, readings[there].name
        try:
            if there not in listening:
                asked = probes[there].listen.remote(receiver["NodeManagerAddress"])
                listening[there] = ray.get(asked, timeout=PATIENCE)
            speed, trouble = ray.get(probes[here].send.remote(*listening[there], SENT), timeout=PATIENCE)
        except (ray.exceptions.RayError, OSError) as error:
            speed, trouble = 0.0, _in_short(error)
        ways.append(WayReading(*names, speed, trouble))
    return tuple(ways)


def _look_for_storage(storage: str, readings: dict[str, NodeReading], probes: Mapping[str, Any]) -> None:
    """A question is written here and read there, and the answer the other way round."""
    if is_url(storage):
        raise RequestError("--storage: name a folder. A job whose engine.storage is a store checks that by itself.")
    folder, nonce = Path(storage), secrets.token_hex(8)
    question = folder / f".quorate-doctor-{nonce}"
    try:
        question.write_text(nonce)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written to here: {error.strerror or error}") from error
    try:
        for node, probe in probes.items():
            answer = question.with_name(f"{question.name}-{node[:8]}")
            try:
                asked = probe.read_and_answer.remote(str(folder), question.name, answer.name)
                read, trouble = ray.get(asked, timeout=PATIENCE)
                if not trouble and (read != nonce or not answer.exists() or answer.read_text() != nonce[::-1]):
                    trouble = "another folder of that name"
            except ray.exceptions.RayError as error:
                trouble = _in_short(error)
            finally:
                answer.unlink(missing_ok=True)
            readings[node] = replace(readings[node], storage_trouble=trouble)
    finally:
        question.unlink(missing_ok=True)


def _in_short(error: BaseException) -> str:
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return f"no answer within {PATIENCE:g} s"
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
