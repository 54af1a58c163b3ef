"""What Ray is told, and asked, in calls of which no cluster is needed."""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray

from quorate.core.errors import RequestError


def test_ray_is_told_the_name_of_a_run_and_not_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils

    from quorate.engines.ray.ray_cluster import RayCluster

    before, told = utils.get_entrypoint_name, []

    def init(**_: Any) -> None:
        told.append(utils.get_entrypoint_name())
        raise RuntimeError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match="no cluster"):
        RayCluster("local", "digits-0001", {}).connect()
    assert told == ["quorate (digits-0001)"]
    assert utils.get_entrypoint_name is before


def test_sigterm_is_still_heard_here_after_ray_has_taken_it_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray.ray_cluster import RayCluster

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def init(**_: Any) -> None:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN, behind Python's back
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    try:
        with pytest.raises(Exception, match="no cluster"):
            RayCluster("local", "digits-0001", {}).connect()
        assert heard == [], "Ray had it"
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", ["ray://head:10001", "auto"])
def test_ray_client_is_refused_with_words(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray.ray_cluster import RayCluster

    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(RequestError, match=r"workers cannot be placed from there.*--detach"):
        RayCluster(address, "digits-0001", {}).connect()


def test_gpus_are_known_where_ray_sets_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray.ray_cluster import gpus_given

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["2", "3"], "TPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert gpus_given() == "2,3"


def test_a_lifeline_holds_those_who_know_its_token_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray import ray_cluster as ray_host

    monkeypatch.setattr(ray_host, "SPEAK_WITHIN", 0.1)
    lifeline = ray_host.Lifeline("127.0.0.1")

    def call(words: bytes) -> socket.socket:
        caller = socket.create_connection(lifeline.address, timeout=60)
        caller.sendall(words)
        return caller

    def is_hung_up_on(caller: socket.socket) -> bool:
        with caller, contextlib.suppress(ConnectionResetError):
            return caller.recv(1) == b""
        return True

    wrong = [b"", b"x", b"x" * 32, lifeline.token[:-1], lifeline.token[:-1] + b"x"]
    assert all(map(is_hung_up_on, [call(words) for words in wrong * 4])), "more than were ever taken"
    with call(lifeline.token) as ours:
        assert is_hung_up_on(call(b"stranger" * 4)), "judged after ours"
        assert select.select([ours], [], [], 0)[0] == [], "it is held"


def test_a_lifeline_that_does_not_take_its_token_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray.ray_cluster import RayHostLink

    class Cut(socket.socket):
        def sendall(self, *_: Any) -> None:
            raise ConnectionResetError

    link, opened = object.__new__(RayHostLink), Cut()
    vars(link).update(_lifeline_asked="asked", _lifeline=None, _node="there")
    monkeypatch.setattr(link, "_answer", lambda *_: (("there", 1), b"token"))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: opened)
    link._hold_lifeline(1.0)
    assert link._lifeline is None and opened.fileno() == -1


def test_a_lifeline_is_looked_at_however_many_files_are_open() -> None:
    """A launcher with many workers has more than the 1,024 that select() knows."""
    from quorate.engines.ray.ray_cluster import RayHostLink

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    link, number = object.__new__(RayHostLink), 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, number)) as lifeline:
            link._lifeline = lifeline
            assert lifeline.fileno() >= number
            assert not link._is_cut()
            theirs.close()
            assert link._is_cut()
        assert link._is_cut(), "closed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_doctor_tells_of_certificates_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.doctor.cluster import read_cluster

    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"):
        monkeypatch.delenv(name, raising=False)
    told = r"RAY_USE_TLS is set here, and RAY_TLS_CA_CERT.* cannot be read"
    with socket.create_server(("", 0)) as cluster, pytest.raises(RequestError, match=told):
        read_cluster(f"127.0.0.1:{cluster.getsockname()[1]}", None)


def test_a_token_is_tried_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorate.engines.ray import connection as ray_connection

    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_connection, "REACH", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as cluster, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        refusal = ray_connection._refusal_at(f"127.0.0.1:{cluster.getsockname()[1]}", "secret")
        assert refusal.code() is not grpc.StatusCode.UNAUTHENTICATED
        assert select.select([cluster, proxy], [], [], 0)[0] == [cluster]
