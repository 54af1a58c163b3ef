"""The state of a job on its way from one worker's memory to another's."""

import json
import logging
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import xxhash

from quorate.checkpoint.attempt import Voucher
from quorate.checkpoint.tensor_file import ALIGNMENT, TensorFile, tensors_in
from quorate.checkpoint.tree import decode, encode
from quorate.core.errors import WorkerUnfit
from quorate.core.generation import Generation
from quorate.core.worker_status import OTHERS
from quorate.reduce.reduction import Reduction
from quorate.training.activity import Activity
from quorate.training.divergence import COMPARE_INDEX, ReplicaDigests, compare_replicas
from quorate.training.progress import Progress
from quorate.training.replica import Replica

log = logging.getLogger(__name__)

COPY_INDEX = 3
PIECE = 64 * 2**20
"""Bytes that are passed on at a time."""

_HEAD = struct.Struct("<Q16s")


def align(
    generation: Generation,
    worker: int,
    reduction: Reduction,
    replica: Replica,
    progress: Progress,
    activity: Activity,
) -> tuple[Progress, int]:
    """Have whoever is behind take up the state of the donor; the progress that all have then, and the bytes it took."""
    if not generation.behind:
        return progress, 0
    step = generation.cursor.step
    with activity.waiting(OTHERS):
        _compare_holders(generation, worker, reduction, replica)
    is_donor = generation.position(worker) == generation.donor
    content = memoryview(_packed(replica, progress)) if is_donor else memoryview(b"")

    def receive(payload: bytes) -> bytes:
        with activity.waiting(OTHERS):
            return reduction.gather(step, COPY_INDEX, payload)[generation.donor]

    head = receive(_HEAD.pack(len(content), _digest(content)) if is_donor else b"")
    size, digest = _HEAD.unpack(head)
    received = bytearray()
    for start in range(0, size, PIECE):
        received += receive(bytes(content[start : start + PIECE]))
    if worker not in generation.behind:
        return progress, size
    if _digest(received) != digest:
        raise WorkerUnfit(f"the state that it has copied at step {step} is not the one that was sent.")
    donor = generation.members[generation.donor].worker
    log.info("copied the state at step %d (%d bytes) from worker %d", step, size, donor)
    return _take_up(received, replica), size


def _compare_holders(generation: Generation, worker: int, reduction: Reduction, replica: Replica) -> None:
    """Nobody copies a state before all who hold it have found that they hold the same."""
    is_holder = worker not in generation.behind
    own = Voucher(worker, ReplicaDigests(replica).of_all()) if is_holder else None
    step = generation.cursor.step
    compare_replicas(step, own, partial(reduction.gather, step, COMPARE_INDEX))


def _packed(replica: Replica, progress: Progress) -> bytes:
    encoded = encode({"replica": replica.state(), "progress": progress.to_dict()})
    text = json.dumps(encoded.skeleton).encode()
    skeleton = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)  # so that the tensors behind it are aligned
    return b"".join(_parts(skeleton, TensorFile(encoded.tensors)))


def _parts(skeleton: bytes, tensors: TensorFile) -> Iterator[Any]:
    yield len(skeleton).to_bytes(8)
    yield skeleton
    yield from tensors.chunks()


def _take_up(content: bytearray, replica: Replica) -> Progress:
    start = 8 + int.from_bytes(content[:8])
    state = decode(json.loads(content[8:start]), tensors_in(memoryview(content)[start:]))
    replica.load(state["replica"])
    return Progress.from_dict(state["progress"])


def _digest(content: Any) -> bytes:
    return xxhash.xxh3_128(content).digest()
