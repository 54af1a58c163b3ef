"""What a job says to NCCL, by which gangs exchange tensors between GPUs: every key with its environment variable.

Nothing else in Quorate names these variables. They are set in the process of a worker before its group is made.
"""

from collections.abc import Mapping, MutableMapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from quorate.spec.keys import Allowed, Mark, one_of
from quorate.spec.section import OptionalPositive, Section

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")

REPEATABLE = "^NVLS,NVLSTree"
"""The algorithms of a deterministic job: a switch that adds up what comes (NVLS) does it in no fixed order."""


def _checked(text: str | None, names: tuple[str, ...]) -> str | None:
    """A list of names, led by ^ where they are the ones not to be used; of some collectives alone as `allreduce:Ring`,
    with a semicolon between."""
    known = {name.lower() for name in names}
    for part in [] if text is None else text.split(";"):
        listed = part.rpartition(":")[2].removeprefix("^").split(",")
        if unknown := [name for name in listed if name.strip().lower() not in known]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(names)}; ^ before a list leaves those out.")
    return text


class NcclSpec(Section):
    """A key that is null is left to NCCL, or to its variable in your shell."""

    interface: Annotated[
        str | None,
        Field(min_length=1),
        Allowed('the beginning of the names of network interfaces, such as eth or "=eth0,eth1" or ^docker, or null'),
    ] = None
    """Network interfaces to use."""
    infiniband: Annotated[
        bool | Annotated[str, Field(min_length=1)] | None,
        Allowed('true, false, the beginning of the names of adapters, such as mlx5 or "=mlx5_0:1", or null'),
    ] = None
    """Whether to use InfiniBand or RoCE, or which adapters."""
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    """Between which GPUs of a host memory is read directly: up to this distance."""
    algorithm: Annotated[
        str | None,
        Mark.MEANING,
        AfterValidator(lambda text: _checked(text, ALGORITHMS)),
        Allowed(f"a list of {one_of(list(ALGORITHMS))}, or ^ and a list of those to leave out, or null"),
    ] = None
    """The algorithms that NCCL may use."""
    protocol: Annotated[
        str | None,
        Mark.MEANING,
        AfterValidator(lambda text: _checked(text, PROTOCOLS)),
        Allowed(f"a list of {one_of(list(PROTOCOLS))}, or ^ and a list of those to leave out, or null"),
    ] = None
    """The protocols that NCCL may use."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL logs."""
    timeout: OptionalPositive = None
    """Seconds after which NCCL itself gives up waiting."""


VARIABLES: Mapping[str, tuple[str, ...]] = {
    "interface": ("NCCL_SOCKET_IFNAME",),
    "infiniband": ("NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    "p2p_level": ("NCCL_P2P_LEVEL",),
    "algorithm": ("NCCL_ALGO",),
    "protocol": ("NCCL_PROTO",),
    "debug": ("NCCL_DEBUG",),
}
"""The variables of each key. `timeout` has none: it is an argument of the group."""

KEYS = {variable: f"nccl.{key}" for key, variables in VARIABLES.items() for variable in variables}

_OURS = {
    # An error ends the sum and not the process: whoever was lost is replaced, and the others keep what they have.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # A GPU that has failed is told by the worker itself, which a thread that raises would not let live so long.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Heartbeats and the lease say whether a worker hangs, and the coordinator ends it.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Else torch sleeps for a minute before it gives back what a failed group holds: for a dump that nobody reads.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def nccl_variables(nccl: NcclSpec, *, deterministic: bool) -> dict[str, str]:
    """The variables that a job sets, by their names."""
    set_by_key = {
        "NCCL_SOCKET_IFNAME": nccl.interface,
        "NCCL_IB_DISABLE": None if nccl.infiniband is None else "1" if nccl.infiniband is False else "0",
        "NCCL_IB_HCA": nccl.infiniband if isinstance(nccl.infiniband, str) else None,
        "NCCL_P2P_LEVEL": nccl.p2p_level,
        "NCCL_ALGO": nccl.algorithm or (REPEATABLE if deterministic else None),
        "NCCL_PROTO": nccl.protocol,
        "NCCL_DEBUG": nccl.debug,
    }
    return {name: value for name, value in set_by_key.items() if value is not None} | _OURS


def set_variables(wanted: Mapping[str, str], environment: MutableMapping[str, str]) -> list[str]:
    """Set them; what is to be told of those that the shell had set to something else."""
    told = []
    for name, value in wanted.items():
        before = environment.get(name, value)
        if before != value:
            by = f" ({KEYS[name]})" if name in KEYS else ""
            told.append(f"{name}={before} of the shell is not used: the job sets it to {value}{by}")
        environment[name] = value
    return told
