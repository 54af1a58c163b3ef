"""Links in pairs, and waits, for tests of everything that uses links."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from quorate.core.generation import GenerationId
from quorate.wire.certificates import Authority
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.reception import LocalListener
from quorate.wire.shared_link import SharedLink, accept_all_shared, connect_shared
from quorate.wire.tcp import Listener, TcpLink, connect

GENERATION = GenerationId(3, 7)


def within(seconds: float) -> Deadline:
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


class Waiting:
    """A deadline that tells when it is first asked: from then on somebody waits."""

    def __init__(self, deadline: Deadline) -> None:
        self.begun = threading.Event()
        self._deadline = deadline

    def __call__(self) -> float:
        self.begun.set()
        return self._deadline()


def credentials(
    worker: int, token: str = "secret", generation: GenerationId = GENERATION, authority: Authority | None = None
) -> Credentials:
    return Credentials(token, worker, generation, None if authority is None else authority.issue(worker))


def accept_shared(listener: LocalListener, credentials: Credentials, peer: int, deadline: Deadline) -> SharedLink:
    """A link to worker `peer` of this host, once it has connected and proven itself."""
    with closing(accept_all_shared(listener, credentials, {peer}, deadline)) as links:
        return next(links)[1]


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[Listener]:
    listener = Listener.bind(host)
    try:
        yield listener
    finally:
        listener.close()


def tcp_pair(
    connects: int = 0, listens: int = 1, host: str = "127.0.0.1", authority: Authority | None = None
) -> tuple[TcpLink, TcpLink]:
    """The connecting worker's end, then the listening worker's; encrypted with certificates of an authority."""
    with listening(host) as listener, ThreadPoolExecutor(1) as threads:
        own = credentials(listens, authority=authority)
        accepting = threads.submit(listener.accept, own, connects, within(100))
        link = connect(listener.address, credentials(connects, authority=authority), listens, within(100))
        return link, accepting.result()


def tls_pair() -> tuple[TcpLink, TcpLink]:
    """The same, encrypted."""
    return tcp_pair(authority=Authority("digits-0001"))


@contextmanager
def listening_locally() -> Iterator[LocalListener]:
    listener = LocalListener()
    try:
        yield listener
    finally:
        listener.close()


def on_host(host: str, local_address: str) -> str:
    """A worker's address on its host, as if that were another host: the socket itself stays where it is."""
    return f"{host}/{local_address.rpartition('/')[2]}" if local_address else ""


def shared_pair(connects: int = 0, listens: int = 1) -> tuple[SharedLink, SharedLink]:
    """The connecting worker's end, then the listening worker's."""
    with listening_locally() as listener, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept_shared, listener, credentials(listens), connects, within(100))
        link = connect_shared(listener.address, credentials(connects), listens, within(100))
        return link, accepting.result()


def open_descriptors() -> set[str]:
    """Each with what it is open to: what an earlier test has left may be collected at any moment, and another may have
    its number then. So nothing is leaked where those after a test are among those before it."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of this look
            found.add(f"{entry.name} is {entry.readlink()}")
    return found


def wait_until(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = within(seconds)
    while not happened():
        assert deadline() > 0, "it did not happen in time"
        time.sleep(0.001)
