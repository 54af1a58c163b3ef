"""How the workers of a generation connect: in shared memory where they run on one host, on a ring elsewhere."""

from collections.abc import Sequence

from quorate.collectives.endpoint import Endpoint
from quorate.collectives.memory import Allocate, GradientMemory, zeros
from quorate.collectives.reduction import Alone, Reduction
from quorate.lanes.buckets import Bucket


def connect(
    endpoint: Endpoint, plan: Sequence[Bucket], *, trusts_versions: bool = False, allocate: Allocate = zeros
) -> tuple[Reduction, GradientMemory]:
    """Sums over all lanes of the generation, and the memory that they are summed in.

    `trusts_versions`: whoever writes to the total between exchanges is known to do so through torch, which counts it.
    `allocate` gives the memory that is not shared.
    """
    if endpoint.is_on_one_host:
        from quorate.collectives.shared_memory import share_memory

        return share_memory(endpoint, plan, trusts_versions=trusts_versions)
    reduction: Reduction = Alone()
    if len(endpoint.generation.members) > 1:
        from quorate.collectives.neighbours import connect_ring

        reduction = connect_ring(endpoint)
    return reduction, GradientMemory.of_process(plan, endpoint.hosting[endpoint.position], allocate)
