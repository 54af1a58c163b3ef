"""A Ray cluster of several nodes on this machine, each with processes of its own.

It lives in a process of its own, ``python ray_nodes.py``: Ray reads its environment once, when it is imported.
"""

import contextlib
import inspect
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

STORE = 80 * 2**20
LOOPBACK = "127.0.0.1"
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


class RayNodes:
    """The first node is the head, where drivers connect. It asks for a token, as Ray's do; `takes_jobs` says that it
    has a server for those who submit jobs, `variables` are for all processes of the cluster, and `gpus` is how many
    each of the first nodes claims to have."""

    def __init__(
        self, *cpus: int, gpus: int = 0, takes_jobs: bool = False, variables: Mapping[str, str] | None = None
    ) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray runs what is submitted by the `python` of its own path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            **token,
            "PATH": path,
            "RAY_raylet_start_wait_time_s": "300",
            **(variables or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(["--jobs"] if takes_jobs else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.environment["RAY_ADDRESS"] = self._ask("start", [list(cpus), gpus])

    def add(self, cpus: int) -> None:
        self._ask("add", cpus)

    def kill_last(self) -> None:
        """As if its machine lost its power: everything there is gone at once, and nobody says so."""
        self._ask("kill_last", None)

    def drain_last(self, seconds: int) -> None:
        """As a cloud that takes its machine back gives notice of it."""
        self._ask("drain_last", seconds)

    def processes(self, title: str) -> list[Any]:
        """Those of Ray's own processes that are called so."""
        import psutil

        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def _ask(self, what: str, argument: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, argument]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process of the cluster has ended"
        return json.loads(line)


class _Served:
    """The cluster itself."""

    def __init__(self, takes_jobs: bool) -> None:
        self._takes_jobs = takes_jobs
        self._cluster: Any = None
        self._nodes: list[Any] = []

    def start(self, what: tuple[list[int], int]) -> str:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        for number in what[0]:
            self.add(number, what[1])
        return str(self._cluster.address)

    def add(self, cpus: int, gpus: int = 0) -> None:
        ports = {name: free_port() for name in PORTS}
        jobs: dict[str, Any] = {"include_dashboard": self._takes_jobs and not self._nodes}
        if jobs["include_dashboard"]:
            jobs |= {"dashboard_host": LOOPBACK, "dashboard_port": free_port()}
        self._nodes.append(
            self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=STORE, **jobs, **ports)
        )

    def kill_last(self, _: None) -> None:
        import psutil

        node = self._nodes.pop()
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def drain_last(self, seconds: int) -> None:
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        raylet: Any = import_module("ray._raylet")  # it has no types
        deadline = (int(time.time()) + seconds) * 1000
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = raylet.GcsClient(address=self._cluster.address)
        is_accepted, why = client.drain_node(self._nodes[-1].node_id, reason, "the spot market", deadline)
        assert is_accepted, why

    def close(self) -> None:
        self._cluster.shutdown()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def be_patient(takes_jobs: bool) -> None:
    """A node gives its agents 15 s to say which ports they have chosen, which a busy machine may not keep: they are
    chosen here, and fewer and smaller processes started, unless somebody needs what comes with a dashboard."""
    import ray._private.services as services
    import ray._private.utils as ray_utils

    start = services.start_raylet

    def start_raylet(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(start).bind(*arguments, **named).arguments
        port = "dashboard_agent_listen_port"
        Path(given["session_dir"], f"{port}_{given['node_id']}").write_text(str(given[port]))
        return start(*arguments, **named)

    services.start_raylet = start_raylet
    if not takes_jobs:
        ray_utils.get_dashboard_dependency_error = lambda: ImportError("not wanted")


def main() -> None:
    """Do what is asked for, line by line; the cluster ends when nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    takes_jobs = "--jobs" in sys.argv
    be_patient(takes_jobs)
    served = _Served(takes_jobs)
    try:
        for line in sys.stdin:
            what, argument = json.loads(line)
            answers.write(json.dumps(getattr(served, what)(argument)) + "\n")
            answers.flush()
    finally:
        served.close()


if __name__ == "__main__":
    main()
