"""A Ray cluster of several nodes on this machine, each with processes of its own.

It lives in a process of its own, ``python ray_nodes.py``: Ray reads its environment once, when it is imported.
"""

import inspect
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

STORE = 80 * 2**20
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


class RayNodes:
    """The first node is the head, where drivers connect. It asks for a token, as Ray's do."""

    def __init__(self, *cpus: int) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**os.environ, **token, "RAY_raylet_start_wait_time_s": "300"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.environment["RAY_ADDRESS"] = self._ask("start", list(cpus))

    def add(self, cpus: int) -> None:
        self._ask("add", cpus)

    def kill_last(self) -> None:
        """As if its machine lost its power: everything there is gone at once, and nobody says so."""
        self._ask("kill_last", None)

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

    def __init__(self) -> None:
        self._cluster: Any = None
        self._nodes: list[Any] = []

    def start(self, cpus: list[int]) -> str:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        for number in cpus:
            self.add(number)
        return str(self._cluster.address)

    def add(self, cpus: int) -> None:
        ports = {name: free_port() for name in PORTS}
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE, include_dashboard=False, **ports)
        self._nodes.append(node)

    def kill_last(self, _: None) -> None:
        import psutil

        node = self._nodes.pop()
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def close(self) -> None:
        self._cluster.shutdown()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def be_patient() -> None:
    """A node gives its agents 15 s to say which ports they have chosen, which a busy machine may not keep: they are
    chosen here, and fewer and smaller processes started, since nobody looks at a dashboard."""
    import ray._private.services as services
    import ray._private.utils as ray_utils

    start = services.start_raylet

    def start_raylet(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(start).bind(*arguments, **named).arguments
        port = "dashboard_agent_listen_port"
        Path(given["session_dir"], f"{port}_{given['node_id']}").write_text(str(given[port]))
        return start(*arguments, **named)

    services.start_raylet = start_raylet
    ray_utils.get_dashboard_dependency_error = lambda: ImportError("not wanted")


def main() -> None:
    """Do what is asked for, line by line; the cluster ends when nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    be_patient()
    served = _Served()
    try:
        for line in sys.stdin:
            what, argument = json.loads(line)
            answers.write(json.dumps(getattr(served, what)(argument)) + "\n")
            answers.flush()
    finally:
        served.close()


if __name__ == "__main__":
    main()
