"""What Gloo and NCCL say when a collective fails, in words that name the workers and what to check."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quorate.core.generation import Member, name_of, names_of


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
