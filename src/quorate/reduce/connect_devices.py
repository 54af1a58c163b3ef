"""How workers that compute on devices connect: through the memory of these where all see it, else by way of the host.

Which of the two it is they agree on before anything is summed: everybody says what it can do and hears the same
answers, so nobody goes another way than the others.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from quorate.core.errors import OutOfMemory
from quorate.core.generation import name_of
from quorate.lanes.buckets import Bucket
from quorate.reduce.connect import connect
from quorate.reduce.device_reduction import DeviceGradients, DeviceReduction, Staged, size_of
from quorate.reduce.endpoint import Endpoint
from quorate.reduce.memory import Allocate, DeviceMemory, GradientMemory, NotShareable
from quorate.reduce.reduction import Alone, Reduction
from quorate.reduce.shared_memory import SharedMemoryReduction

log = logging.getLogger(__name__)

PLACED, CREATED, ADOPTED = 11, 12, 13
"""Tell apart what is gathered to agree."""


class SeveralDevices(NotShareable):
    """As on any machine of several GPUs: nothing is wrong."""


def connect_devices(
    endpoint: Endpoint,
    plan: Sequence[Bucket],
    device: DeviceMemory,
    allocate: Allocate,
    *,
    trusts_versions: bool = False,
) -> tuple[Reduction, GradientMemory]:
    """Sums over all lanes of the generation, and the memory of this device in which they are formed.

    `allocate` gives memory there that nobody else sees.
    """
    if plan and endpoint.is_on_one_host:
        shared = _share(endpoint, plan, device)
        if shared is not None:
            return shared
    own: Reduction = Alone()  # who is alone sums on the device, and needs nothing on the host
    if len(endpoint.generation.members) > 1:
        links, host = connect(endpoint, plan, trusts_versions=trusts_versions, allocate=device.zeros_on_host)
        own = Staged(links, host, device)
    return own, GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], allocate)


def _share(
    endpoint: Endpoint, plan: Sequence[Bucket], device: DeviceMemory
) -> tuple[DeviceReduction, DeviceGradients] | None:
    """None where somebody cannot; then nobody does, and all connections are closed again."""
    # To agree is part of connecting: whoever waits for one that does not answer looks whether the generation is over.
    links, _ = connect(replace(endpoint, lease=endpoint.deadline), ())
    assert isinstance(links, SharedMemoryReduction), "workers of one host share memory"
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(links.close)
        try:
            pieces = _pieces(endpoint, plan, device, links)
        except NotShareable as why:
            # Everybody has heard the same, and one voice is enough.
            level = logging.WARNING if endpoint.position == 0 and not isinstance(why, SeveralDevices) else logging.INFO
            log.log(level, "gradients are summed by way of the host's memory: %s", str(why))
            return None
        on_failure.pop_all()
    links.deadline = endpoint.lease
    log.info("gradients are summed in the memory of the devices: all %d workers see it", len(pieces))
    memory = DeviceGradients(plan, endpoint.hosting, endpoint.position, pieces)
    return DeviceReduction(links, endpoint.generation, endpoint.credentials.worker, memory, device), memory


def _pieces(
    endpoint: Endpoint, plan: Sequence[Bucket], device: DeviceMemory, links: SharedMemoryReduction
) -> list[torch.Tensor]:
    """What each worker shares, by ring position. NotShareable, on all of them, if one of them cannot."""
    position, hosting = endpoint.position, endpoint.hosting
    place, obstacle, descriptor = "", "", None
    try:
        place = device.place()
    except NotShareable as error:
        obstacle = str(error)
    # Before memory is taken that nobody would read.
    if len(set(_agree(endpoint, links, PLACED, place, obstacle))) > 1:
        raise SeveralDevices("the workers compute on different devices")
    with contextlib.ExitStack() as descriptors:
        try:
            own, descriptor = device.create(size_of(plan, hosting[position]))
            descriptors.callback(os.close, descriptor)
        except (NotShareable, OutOfMemory) as error:
            obstacle = str(error)
        _agree(endpoint, links, CREATED, "", obstacle)
        assert descriptor is not None, "an obstacle would have been told to all"
        pieces = {position: own}
        for peer, given in links.exchange_descriptors(descriptor).items():
            descriptors.callback(os.close, given)
            if not obstacle:
                try:
                    pieces[peer] = device.adopt(given, size_of(plan, hosting[peer]))
                except NotShareable as error:
                    obstacle = str(error)
        _agree(endpoint, links, ADOPTED, "", obstacle)
    return [pieces[place] for place in range(len(hosting))]


def _agree(endpoint: Endpoint, links: SharedMemoryReduction, index: int, word: str, obstacle: str) -> list[str]:
    """Everybody's word. NotShareable, on all of them, if anybody has met an obstacle."""
    told = links.gather(0, index, f"-{obstacle}".encode() if obstacle else f"+{word}".encode())
    words = [payload.decode() for payload in told]
    for member, said in zip(endpoint.generation.members, words, strict=True):
        if said.startswith("-"):
            raise NotShareable(f"{name_of(member.worker)}: {said[1:]}")
    return [said[1:] for said in words]
