"""Two workers, joined by an encrypted link and by a plain one over the same cable."""

import secrets
import statistics
import time
from typing import Any

from benchmarks.cable import plug_in
from benchmarks.gang import Seat, run_gang
from benchmarks.links import PLAIN, SYSTEMS, TLS
from benchmarks.told import answer, read_order, reading
from quorate.core.generation import GenerationId
from quorate.wire.certificates import Authority
from quorate.wire.handshake import Credentials, Identity
from quorate.wire.link import Deadline, Tag
from quorate.wire.tcp import Listener, TcpLink, connect

RECEIVER, SENDER = 0, 1
"""The processes."""
GENERATION = GenerationId(1, 1)
FRAME, RECEIPT = 1, 2
"""The channels."""
WARM_UP = 3

Sent = tuple[float, float]
"""How long a process was busy with a frame, and the processor time that it took, in seconds."""


def main() -> None:
    """Answer the launcher."""
    order = read_order()
    token = secrets.token_urlsafe(16)
    authority = Authority("links-0001")
    identities = [authority.issue(RECEIVER), authority.issue(SENDER)]
    everyone = run_gang(2, lambda seat: _work(seat, order, token, identities[seat.position]))
    answer(*(_reading(order, system.name, [process[system.name] for process in everyone]) for system in SYSTEMS))


def _work(seat: Seat, order: dict[str, Any], token: str, identity: Identity) -> dict[str, list[Sent]]:
    """One end of both links. They take turns, so that noise hits both alike."""
    over: float = time.monotonic() + order["limit"]

    def deadline() -> float:
        return over - time.monotonic()

    host = plug_in(seat, order["mbit"])
    links = {
        TLS.name: _link(seat, host, Credentials(token, seat.position, GENERATION, identity), deadline),
        PLAIN.name: _link(seat, host, Credentials(token, seat.position, GENERATION), deadline),
    }
    content = bytearray(secrets.token_bytes(order["size"]))
    carry = _send if seat.position == SENDER else _receive
    sent: dict[str, list[Sent]] = {name: [] for name in links}
    for number in range(WARM_UP + order["repeats"]):
        for name, link in links.items():
            seat.gather("ready")
            taken = carry(link, number, content, deadline)
            if number >= WARM_UP:
                sent[name].append(taken)
    for link in links.values():
        link.close()
    return sent


def _link(seat: Seat, host: str, credentials: Credentials, deadline: Deadline) -> TcpLink:
    if seat.position == SENDER:
        return connect(seat.gather("")[RECEIVER], credentials, RECEIVER, deadline)
    listener = Listener.bind(host)
    try:
        seat.gather(listener.address)
        return listener.accept(credentials, SENDER, deadline)
    finally:
        listener.close()


def _send(link: TcpLink, number: int, content: bytearray, deadline: Deadline) -> Sent:
    began, used = time.perf_counter(), time.process_time()
    link.send(Tag(GENERATION, number, FRAME, 0), content, deadline)
    link.receive(Tag(GENERATION, number, RECEIPT, 0), deadline)
    return time.perf_counter() - began, time.process_time() - used


def _receive(link: TcpLink, number: int, content: bytearray, deadline: Deadline) -> Sent:
    began, used = time.perf_counter(), time.process_time()
    link.receive_into(Tag(GENERATION, number, FRAME, 0), content, deadline)
    link.send(Tag(GENERATION, number, RECEIPT, 0), b"", deadline)
    return time.perf_counter() - began, time.process_time() - used


def _reading(order: dict[str, Any], system: str, everyone: list[list[Sent]]) -> dict[str, Any]:
    cpu = {
        f"{end}_cpu_ms": statistics.median(used for _, used in everyone[process]) * 1000
        for end, process in (("sender", SENDER), ("receiver", RECEIVER))
    }
    ms = [seconds * 1000 for seconds, _ in everyone[SENDER]]
    return reading(order["case"], 2, ms, size=order["size"], details=cpu, system=system)


if __name__ == "__main__":
    main()
