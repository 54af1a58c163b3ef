"""Hosts of a Ray cluster on this machine: each is a network namespace with a node of its own, from `ray start`, whose
cable can be cut and whose power can be lost."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import await_condition
from quorate.chaos.network_namespaces import DEVICE, NetworkNamespaces, call, inside_network
from quorate.engines.local import COORDINATOR

PROGRAM = Path(__file__).with_name("ray_host_program.py")
PORT = 6379
PORTS = ("metrics-export-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port")
STORE = 80 * 2**20
PATIENCE = 240.0
STARTED = "Ray runtime started"


class RayHosts:
    """So many hosts, of which the first has the head. `with_redis`: what the head knows is kept in Redis, and another
    head knows it."""

    def __init__(self, folder: Path, count: int, *, with_redis: bool = False) -> None:
        self._folder = folder
        self._namespaces = NetworkNamespaces(count)
        self._namespaces.__enter__()
        self._places = (*range(count), COORDINATOR)
        for place in range(count):
            # It leads nowhere; by where it begins Ray finds a host's own address.
            self._inside(place, lambda: call("ip", ["route", "add", "default", "dev", DEVICE]))
        self._started: list[subprocess.Popen[bytes]] = []
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # A busy machine takes its time to start a node, and a head that its nodes wait for.
        patience = {"RAY_raylet_start_wait_time_s": "300", "RAY_gcs_rpc_server_reconnect_timeout_s": "300"}
        # Where each host has a folder of its own, whatever TMPDIR says.
        self.environment = {**os.environ, **token, **patience, "RAY_TMPDIR": "/tmp", "RAY_ADDRESS": self.address}
        self._redis = self._start_redis() if with_redis else ""

    @property
    def address(self) -> str:
        return f"{self._namespaces.network_of(0).address}:{PORT}"

    def start_head(self, cpus: int) -> None:
        kept = {"RAY_REDIS_ADDRESS": self._redis, "RAY_external_storage_namespace": "test"} if self._redis else {}
        self._start_node(0, cpus, kept, "--head", f"--port={PORT}", "--include-dashboard=false")

    def start_node(self, place: int, cpus: int) -> None:
        self._start_node(place, cpus, {}, f"--address={self.address}")

    def popen(self, place: int, module: str, *arguments: str, **options: Any) -> "subprocess.Popen[Any]":
        """Start a program of Python's on a host."""
        folder = self._folder / f"host-{place}"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, str(PROGRAM), str(folder), module, *arguments]
        process: subprocess.Popen[Any] = self._inside(
            place, lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        )
        return process

    def cut(self, place: int) -> None:
        self._namespaces.cut(place)

    def heal(self, place: int) -> None:
        self._namespaces.heal(place)

    def lose_power(self, place: int) -> None:
        """Everything there is gone at once, and nobody says so."""
        await_condition("the end of all there", lambda: not self._kill_all(place))

    def close(self) -> None:
        for place in self._places:
            self.lose_power(place)
        for process in self._started:
            process.wait()
        self._namespaces.close()

    def _start_node(self, place: int, cpus: int, more: dict[str, str], *options: str) -> None:
        address = self._namespaces.network_of(place).address
        told = self._folder / f"ray-{place}-{len(self._started)}.log"
        ports = (f"--{name}={PORT + 1 + number}" for number, name in enumerate(PORTS))
        resources = (f"--num-cpus={cpus}", f"--object-store-memory={STORE}")
        with told.open("wb") as log:
            process = self.popen(
                place,
                "ray",
                *("start", "--block", "--disable-usage-stats", f"--node-ip-address={address}", *options),
                *(*resources, *ports),
                env={name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"} | more,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)

        def is_up() -> bool:
            assert process.poll() is None, told.read_text()
            return STARTED in told.read_text()

        await_condition(f"the node of host {place}", is_up, PATIENCE)

    def _start_redis(self) -> str:
        """At the hub, which all hosts reach and none is."""
        place = self._namespaces.network_of(COORDINATOR).address, PORT
        command = ["redis-server", "--bind", place[0], "--port", str(PORT), "--save", "", "--protected-mode", "no"]
        with (self._folder / "redis.log").open("wb") as log:
            start = lambda: subprocess.Popen(command, stdout=log, stderr=log)  # noqa: E731
            self._started.append(self._inside(COORDINATOR, start))

        def is_up() -> bool:
            with contextlib.suppress(OSError):
                self._inside(COORDINATOR, lambda: socket.create_connection(place, timeout=1).close())
                return True
            return False

        await_condition("Redis", is_up, PATIENCE)
        return f"{place[0]}:{place[1]}"

    def _inside(self, place: int, work: Any) -> Any:
        return inside_network(self._namespaces.network_of(place).namespace, work)

    def _kill_all(self, place: int) -> int:
        """End all processes of a host; how many there were."""
        namespace = Path(self._namespaces.network_of(place).namespace).stat().st_ino
        found = 0
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_over = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_over and (entry / "ns" / "net").stat().st_ino == namespace:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found += 1
        return found
