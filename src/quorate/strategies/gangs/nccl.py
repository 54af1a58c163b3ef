"""NCCL as a worker uses it: told what the job says before a group is made, and ended so that nobody waits for it.

Nothing else in Quorate names its environment variables. They are set in the process of a worker.
"""

import logging
import os
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from quorate.spec.job import JobSpec
from quorate.spec.options import added
from quorate.strategies.gangs.option import NcclSpec

log = logging.getLogger(__name__)

REPEATABLE = "^NVLS,NVLSTree"
"""The algorithms of a deterministic job: a switch that adds up what comes (NVLS) does it in no fixed order."""


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

ABORT_PATIENCE = 2.0
"""Seconds that the end of a group is waited for. Mostly it takes milliseconds."""


def nccl_of(spec: JobSpec) -> NcclSpec:
    """What a job says to NCCL."""
    return added(spec, "nccl", NcclSpec)


def prepare_nccl(spec: JobSpec, *, on_host: bool) -> None:
    """Set its variables in this process, which reads them when its first group is made."""
    nccl = nccl_of(spec)
    if on_host:
        if given := sorted(key for key, value in nccl if value != NcclSpec.model_fields[key].default):
            log.warning("nccl (%s) does nothing here: this job computes on the host", ", ".join(given))
        return
    for told in set_variables(nccl_variables(nccl, deterministic=spec.deterministic), os.environ):
        log.warning("%s", told)


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


class Ending:
    """A thread that aborts a group of NCCL: kernels that wait for a lost worker return, and its memory is given back.

    Torch waits for that as long as for a collective, which is a day here, and on a GPU that has failed it may never
    come. So nobody else does: a daemon does it, and keeps what must not be destroyed meanwhile.
    """

    def __init__(self, backend: Any) -> None:
        self._held: list[Any] = [backend]
        self._may_let_go = threading.Event()
        self._is_aborted = threading.Event()
        threading.Thread(target=self._end, name="quorate-nccl-abort", daemon=True).start()

    def wait(self, held: list[Any], patience: float = ABORT_PATIENCE) -> bool:
        """Take over what belongs to the group, and wait for its end, but not for long; whether it has come."""
        self._held += held
        held.clear()
        self._may_let_go.set()
        if not self._is_aborted.wait(patience):
            log.warning("NCCL has not ended its group within %g s: it is left to a thread", patience)
        return self._is_aborted.is_set()

    def _end(self) -> None:
        try:
            self._held[0].abort()
        except RuntimeError as error:
            log.info("NCCL says of the end of its group: %s", error)
        self._is_aborted.set()
        # Its last reference goes here: destroying it joins its threads, which may hang as well.
        self._may_let_go.wait()
        self._held.clear()
