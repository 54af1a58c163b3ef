"""Links in pairs, and waits, for tests of everything that uses links."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quorate.core.generation import GenerationId
from quorate.wire.handshake import Credentials
from quorate.wire.link import Deadline
from quorate.wire.local import LocalListener
from quorate.wire.shared_link import SharedLink, accept_shared, connect_shared
from quorate.wire.tcp import Listener, TcpLink, connect

GENERATION = GenerationId(3, 7)


def within(seconds: float) -> Deadline:
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def credentials(worker: int, token: str = "secret", generation: GenerationId = GENERATION) -> Credentials:
    return Credentials(token, worker, generation)


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[Listener]:
    listener = Listener.bind(host)
    try:
        yield listener
    finally:
        listener.close()


def tcp_pair(connects: int = 0, listens: int = 1, host: str = "127.0.0.1") -> tuple[TcpLink, TcpLink]:
    """The connecting worker's end, then the listening worker's."""
    with listening(host) as listener, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(listener.accept, credentials(listens), connects, within(5))
        link = connect(listener.address, credentials(connects), listens, within(5))
        return link, accepting.result()


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
        accepting = threads.submit(accept_shared, listener, credentials(listens), connects, within(5))
        link = connect_shared(listener.address, credentials(connects), listens, within(5))
        return link, accepting.result()


def open_descriptors() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def wait_until(happened: Callable[[], bool], seconds: float = 5) -> None:
    deadline = within(seconds)
    while not happened():
        assert deadline() > 0, "it did not happen in time"
        time.sleep(0.001)
