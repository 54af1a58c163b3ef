"""NCCL as a worker uses it: told what the job says before a group is made, and ended so that nobody waits for it.

Nothing else in Quorate names its environment variables. They are set in the process of a worker.
"""

import logging
import os
import re
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quorate.core.generation import Member, name_of, names_of
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


# --- what Gloo and NCCL say when a collective fails, in words that name the workers and what to check


@dataclass(frozen=True)
class Cause:
    """What has happened, and what to check. `is_final`: it would happen again to whoever came next.

    It is recognised by its pattern. What that catches stands in `happened` by its name: a `rank` or a `host` becomes
    the worker that is meant.
    """

    pattern: str
    happened: str
    check: str
    is_final: bool = False


_NETWORK = "Check that hosts reach each other on all ports, and by which network: nccl.interface, `quorate doctor`."
_OTHER_END = "Look for its cause in the log of that worker; if there is none, the network between the hosts has failed."
_GPU = "Look at `nvidia-smi` and at the kernel's log (`dmesg`, Xid) of this worker's host."

_CAUSES = (
    Cause(
        r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<rank_2>\d+) both on CUDA device (?P<bus>\w+)",
        "{rank} and {rank_2} were given the same GPU (bus {bus}), and NCCL takes one worker for each",
        "Start no more workers than there are GPUs, and look at CUDA_VISIBLE_DEVICES.",
        is_final=True,
    ),
    Cause(
        r"Mismatched NCCL version.*: rank (?P<rank>\d+) has (?P<own>\S+) rank (?P<rank_2>\d+) has (?P<other>\S+)",
        "{rank} has NCCL {own}, and {rank_2} has {other}",
        "Install the same torch on all hosts.",
        is_final=True,
    ),
    Cause(
        r"no (?:NCCL_SOCKET_IFNAME |socket )?interface found|is neither AF_INET",
        "NCCL has found no network interface that it may use",
        "Name one that is there: nccl.interface; `quorate doctor` lists them.",
        is_final=True,
    ),
    Cause(
        r"(?:creating shared memory segment|/dev/shm|shm_open|No space left on device)",
        "there is not enough shared memory on this worker's host",
        "In a container: docker run --shm-size=1g, or --ipc=host.",
    ),
    Cause(
        r"NET/IB\w* ?: ?Got completion from peer (?P<host>\S+?)<\d+> with (?:error|status)[ =](?P<status>\d+)",
        "InfiniBand or RoCE has lost {host} (status {status})",
        "Look at `ibstat` on both hosts; nccl.infiniband: false shows whether TCP works.",
    ),
    Cause(
        r"Call to (?P<call>ibv_\w+) failed with (?:error )?(?P<why>[^,\n]+)",
        "the InfiniBand or RoCE adapter has failed ({call}: {why})",
        "Look at `ibstat`; name the adapters that reach the others (nccl.infiniband: mlx5_0), or false for TCP. "
        "In a container: --device /dev/infiniband, and no limit on locked memory.",
    ),
    Cause(
        r"[Cc]onnect(?:ion)? to (?P<host>\S+?)<\d+> failed ?: ?(?P<why>[^\n]+)",
        "no connection to {host} could be made: {why}",
        f"{_NETWORK} A firewall may be in between.",
    ),
    Cause(
        r"(?:recv from|send to|closed by remote peer|reset by peer) (?P<host>\S+?)<\d+>",
        "the connection to {host} has ended",
        _OTHER_END,
    ),
    Cause(
        r"(?:closed by peer|[Rr]ead error|[Ww]rite error) \[(?P<host>[^\]\s]+)\]",
        "the connection to {host} has ended",
        _OTHER_END,
    ),
    Cause(
        r"OpType=(?P<kind>\w+).*?Timeout\(ms\)=(?P<ms>\d+)",
        "{kind} was not done within {ms} ms",
        "A worker was late or hangs; nccl.timeout sets this time, and without it who is lost is found sooner.",
    ),
    Cause(r"out of memory", "this worker's GPU has no memory left for NCCL's buffers", "Use a smaller batch_size."),
    Cause(r"unhandled cuda error|ncclUnhandledCudaError|CUDA error", "this worker's GPU has failed", _GPU),
    Cause(
        r"remote process exited|ncclRemoteError|reset by peer|closed by peer|Broken pipe",
        "the connection to another worker has ended",
        _OTHER_END,
    ),
    Cause(r"[Tt]imed out|timeout", "a worker did not come in time", _NETWORK),
    Cause(r"Connection refused|[Cc]onnect", "a connection to another worker could not be made", _NETWORK),
    Cause(
        r"unhandled system error|ncclSystemError",
        "a call to the system or to a network library has failed",
        "See what NCCL says with nccl.debug: INFO.",
    ),
    Cause(
        r"invalid usage|ncclInvalidUsage|invalid argument|ncclInvalidArgument",
        "NCCL was called in a way that it refuses",
        "See what it says with nccl.debug: WARN.",
        is_final=True,
    ),
    Cause(r"internal error|ncclInternalError", "NCCL itself has failed", "See what it says with nccl.debug: INFO."),
)


def explain(text: str, members: Sequence[Member]) -> Cause:
    """Why a collective among these members has failed, from what its backend says."""
    for cause in _CAUSES:
        if found := re.search(cause.pattern, text, re.DOTALL):
            words = {name: _named(name, word, members) for name, word in found.groupdict().items()}
            return replace(cause, happened=cause.happened.format(**words))
    return Cause("", "it is not known why", "See what NCCL says with nccl.debug: INFO.")


def gist(text: str) -> str:
    """The line of it that says most: NCCL has it at the end, where it has one."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    last = next((at for at, line in enumerate(lines) if line.startswith("Last error")), None)
    if last is not None and last + 1 < len(lines):
        return lines[last + 1]
    return lines[0] if lines else "nothing"


def _named(kind: str, word: str, members: Sequence[Member]) -> str:
    if kind.startswith("rank") and int(word) < len(members):
        return name_of(members[int(word)].worker)
    there = [member.worker for member in members if member.address.rpartition(":")[0].strip("[]") == word]
    return f"{names_of(there, ' or ')} ({word})" if kind == "host" and there else word
