"""A member's links to those on the other side, workers or parameter servers, and the order in which it meets them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from quorate.core.generation import Generation, Role
from quorate.reduce.ring import Blame, unchanged
from quorate.strategies.servers.parcels import meetings
from quorate.wire.link import Deadline, Link, Tag


class Spokes:
    """Links from a worker to all servers, or from a server to all workers, by position.

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

    def close(self) -> None:
        """Any thread may call it, any number of times."""
        for link in self._links.values():
            link.close()


def as_bytes(content: torch.Tensor) -> memoryview:
    """What travels of a tensor."""
    if content.dim() != 1 or not content.is_contiguous() or content.device.type != "cpu":
        shape = f"shape {tuple(content.shape)}, strides {content.stride()} on {content.device}"
        raise ValueError(f"a tensor has {shape}: servers are sent flat, contiguous tensors in CPU memory")
    view: memoryview = content.detach().view(torch.uint8).numpy().data  # as bytes first: bfloat16 has no NumPy type
    return view
