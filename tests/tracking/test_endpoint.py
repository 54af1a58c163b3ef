"""The HTTP server in the launcher: pages, wrong requests, ports in use, and silent clients."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from quorate.core.errors import RequestError
from quorate.tracking import prometheus as endpoint_module
from quorate.tracking.prometheus import Answer, Endpoint


def broken(_: str) -> Answer:
    raise RuntimeError("the page is broken")


PAGES = {"/hello": lambda accept: Answer(f"hello {accept}\n".encode()), "/broken": broken}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", 0, PAGES)
    yield made
    made.close()


def get(endpoint: Endpoint, path: str, method: str = "GET", accept: str = "text/plain") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{endpoint.address}{path}", method=method, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_pages_are_served_by_their_paths(endpoint: Endpoint) -> None:
    assert get(endpoint, "/hello") == (200, "hello text/plain\n")
    assert get(endpoint, "/hello?at=once", accept="any") == (200, "hello any\n")
    assert get(endpoint, "/hello", "HEAD") == (200, "")


def test_what_is_no_page_and_what_is_no_question(endpoint: Endpoint) -> None:
    code, text = get(endpoint, "/")
    assert code == 404 and "/hello" in text
    assert get(endpoint, "/hello", "POST")[0] == 501


def test_a_page_that_raises_disturbs_nobody(endpoint: Endpoint) -> None:
    code, text = get(endpoint, "/broken")
    assert code == 500 and "the page is broken" in text
    assert get(endpoint, "/hello")[0] == 200


def test_a_port_in_use_is_told_with_what_to_do(endpoint: Endpoint) -> None:
    port = int(endpoint.address.rpartition(":")[2])
    with pytest.raises(RequestError, match=rf"127\.0\.0\.1:{port} \(Address already in use\).*0 for any free one"):
        Endpoint("127.0.0.1", port, PAGES)


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7"])
def test_an_address_that_cannot_be_had_is_told(host: str) -> None:
    with pytest.raises(RequestError, match="nothing can listen on"):
        Endpoint(host, 0, PAGES)


def test_the_address_is_one_that_can_be_asked() -> None:
    with contextlib.closing(Endpoint("127.0.0.1", 0, PAGES)) as made:
        assert made.address.startswith("127.0.0.1:")
        assert get(made, "/hello")[0] == 200


def test_who_listens_for_other_machines_says_where_they_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_own_address", lambda _: "127.0.0.2")
    with contextlib.closing(Endpoint("0.0.0.0", 0, PAGES)) as made:
        assert made.address.startswith("127.0.0.2:")
        assert get(made, "/hello")[0] == 200


def test_the_own_address_is_that_of_the_way_out_or_else_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {address.address for each in psutil.net_if_addrs().values() for address in each}
    with contextlib.closing(Endpoint("0.0.0.0", 0, PAGES)) as made:
        host = made.address.rpartition(":")[0]
        assert host in others - {"127.0.0.1"} or host == socket.gethostname()

    class NoWay(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", NoWay)
    assert endpoint_module._own_address(socket.AF_INET) == socket.gethostname()


def test_on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with contextlib.closing(Endpoint("::1", 0, PAGES)) as made:
        assert made.address.startswith("[::1]:")
        assert get(made, "/hello")[0] == 200


def test_who_connects_and_says_nothing_holds_up_neither_others_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HANG_UP_AFTER", 100.0)
    monkeypatch.setattr(endpoint_module._Handler, "timeout", 100.0)
    made = Endpoint("127.0.0.1", 0, PAGES)
    host, _, port = made.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        began = time.monotonic()
        assert get(made, "/hello")[0] == 200
        made.close()
        assert time.monotonic() - began < 50


def test_who_connects_and_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module._Handler, "timeout", 0.2)
    with contextlib.closing(Endpoint("127.0.0.1", 0, PAGES)) as made:
        host, _, port = made.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            assert silent.recv(1) == b""


def test_closed_it_leaves_neither_thread_nor_port() -> None:
    before = set(threading.enumerate())
    made = Endpoint("127.0.0.1", 0, PAGES)
    address = made.address
    made.close()
    assert set(threading.enumerate()) <= before
    again = Endpoint("127.0.0.1", int(address.rpartition(":")[2]), PAGES)
    again.close()
