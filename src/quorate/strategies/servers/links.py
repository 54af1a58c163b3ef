"""Links where there are parameter servers: every server to every worker, and to every other server."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.neighbours import Neighbour, connect_members
from quorate.collectives.reduction import Reduction
from quorate.collectives.ring import Blame, unchanged
from quorate.core.generation import Generation, Role, name_of
from quorate.cuda.reduction import Wrapped
from quorate.wire.link import Deadline, Link, Tag
from quorate.wire.shared_link import SharedLink

log = logging.getLogger(__name__)


def connect_star(endpoint: Endpoint, reduction: Reduction) -> dict[int, Neighbour]:
    """Links by position: from a worker to every server, from a server to everybody else.

    All members call it. `reduction` is what connects them already: a handshake does not say what a connection is for,
    so none of these may begin before all of those are made.
    """
    reduction.gather(0, 0, b"star")
    peers, own = peers_of(endpoint.generation, endpoint.position), endpoint.position
    before, behind = [peer for peer in peers if peer < own], [peer for peer in peers if peer > own]
    connected, accepted = connect_members(endpoint, before, behind)
    links = connected | accepted
    in_memory = sum(isinstance(link, SharedLink) for link in links.values())
    log.info("linked to %d others for parameters, %d of them in shared memory", len(links), in_memory)
    return links


def peers_of(generation: Generation, position: int) -> tuple[int, ...]:
    """The members to whom the one at a position is linked: workers are not linked to each other."""
    is_worker = [member.role is Role.WORKER for member in generation.members]
    return tuple(
        peer for peer in range(len(is_worker)) if peer != position and not (is_worker[peer] and is_worker[position])
    )


class LinkedReduction(Wrapped):
    """The reduction of a generation, and with it the links to servers: who closes one closes all."""

    def __init__(self, reduction: Reduction, links: Mapping[int, Neighbour]) -> None:
        super().__init__(reduction)
        self._neighbours = links

    def close(self) -> None:
        for link in self._neighbours.values():
            link.close()
        super().close()


class Spokes:
    """Links from a worker to all servers, or from a server to all workers, by position, and the order to meet them.

    It owns them: any failure closes all, which is how bad news spreads. `peers` are in the order in which everybody
    has to meet them, each time from the first: then nobody waits in a circle, whatever links hold back. One thread at
    a time.
    """

    def __init__(
        self,
        generation: Generation,
        worker: int,
        links: Mapping[int, Link],
        deadline: Deadline,
        blame: Blame = unchanged,
    ) -> None:
        self.generation = generation
        self.position = generation.position(worker)
        workers = [place for place, member in enumerate(generation.members) if member.role is Role.WORKER]
        servers = [place for place in range(len(generation.members)) if place not in workers]
        self.is_worker = self.position in workers
        if self.is_worker:
            met = meetings(len(workers), len(servers), worker=workers.index(self.position))
            self.peers = tuple(servers[server] for server in met)
        else:
            met = meetings(len(workers), len(servers), server=servers.index(self.position))
            self.peers = tuple(workers[worker_met] for worker_met in met)
        self.servers = tuple(servers)
        self._links = {peer: links[peer] for peer in self.peers}
        self._deadline = deadline
        self._blame = blame
        self.bytes_sent = self.bytes_received = 0

    def send(self, peer: int, tag: Tag, content: torch.Tensor) -> None:
        """A flat tensor, which may change once this returns."""
        payload = as_bytes(content)
        self._links[peer].send(tag, payload, self._deadline)
        self.bytes_sent += len(payload)

    def receive(self, peer: int, tag: Tag, content: torch.Tensor) -> None:
        """Fill a flat tensor."""
        payload = as_bytes(content)
        self._links[peer].receive_into(tag, payload, self._deadline)
        self.bytes_received += len(payload)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """What fails in here closes all links, and is raised as whoever is to blame for it."""
        try:
            yield
        except BaseException as error:
            reason = self._blame(error)
            self.close()
            if reason is error:
                raise
            raise reason from None

    def name(self, peer: int) -> str:
        return name_of(self.generation.members[peer].worker)

    def close(self) -> None:
        """Any thread may call it, any number of times."""
        for link in self._links.values():
            link.close()


def meetings(workers: int, servers: int, *, worker: int | None = None, server: int | None = None) -> tuple[int, ...]:
    """The servers that a worker meets, or the workers that a server meets, one after the other.

    As in a tournament: in each round everybody meets one other at most, and both go through the rounds in the same
    order. So nobody waits in a circle, and no server is idle while all workers crowd at the first.
    """
    rounds = max(workers, servers)
    if worker is not None:
        partners = [(worker + round_) % rounds for round_ in range(rounds)]
        return tuple(partner for partner in partners if partner < servers)
    assert server is not None, "one of the two is asked for"
    partners = [(server - round_) % rounds for round_ in range(rounds)]
    return tuple(partner for partner in partners if partner < workers)


def as_bytes(content: torch.Tensor) -> memoryview:
    """What travels of a tensor."""
    if content.dim() != 1 or not content.is_contiguous() or content.device.type != "cpu":
        shape = f"shape {tuple(content.shape)}, strides {content.stride()} on {content.device}"
        raise ValueError(f"a tensor has {shape}: servers are sent flat, contiguous tensors in CPU memory")
    view: memoryview = content.detach().view(torch.uint8).numpy().data  # as bytes first: bfloat16 has no NumPy type
    return view
