"""Torch, tried in a process of its own, ``python -m quorate.doctor.probes``: one that hangs takes nobody with it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from quorate.core.processes import describe_departure
from quorate.core.user_code import describe
from quorate.engines.local import ENVIRONMENT
from quorate.observe.quantities import size


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself; with an `error`, nothing else of it is known."""

    error: str = ""
    version: str = ""
    capability: str = ""
    repeats_bits: bool = False
    # Each GPU that torch can use, in words, and the CUDA that torch was built for, if it was.
    cuda: tuple[str, ...] = ()
    built_for: str = ""
    # The version of the NCCL that comes with torch, if one does, and the pairs of GPUs that have no direct way.
    nccl: str = ""
    apart: tuple[tuple[int, int], ...] = ()


def probe_torch(patience: float) -> TorchFacts:
    """Import torch with the environment that workers have, and compute the same twice."""
    command = [sys.executable, "-P", "-m", "quorate.doctor.probes"]
    environment = {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"its import has not ended within {patience:g} s")
    # The last line: torch or a plug-in of it may have said something before.
    try:
        fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        apart = tuple((one, other) for one, other in fields["apart"])
        return TorchFacts(**{**fields, "cuda": tuple(fields["cuda"]), "apart": apart})
    except (IndexError, ValueError, KeyError, TypeError):
        return TorchFacts(error=f"the process that imported it {describe_departure(done.returncode)}")


def _try_torch() -> TorchFacts:
    try:
        import torch

        from quorate.training.device import CPU, canary

        CPU.pin(1, deterministic=True)
        return TorchFacts(
            version=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            repeats_bits=canary(CPU) == canary(CPU),
            cuda=_cuda_devices(),
            built_for=torch.version.cuda or "",
            nccl=_nccl_version(),
            apart=_pairs_apart(),
        )
    except Exception as error:
        return TorchFacts(error=describe(error))


def _cuda_devices() -> tuple[str, ...]:
    import torch

    from quorate.training.cuda_device import oldest_capability

    try:
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        oldest = oldest_capability()
        return tuple(
            f"{each.name} ({size(each.total_memory)}, capability {each.major}.{each.minor}"
            + (", too old for torch)" if (each.major, each.minor) < oldest else ")")
            for each in found
        )
    except Exception as error:  # of a driver that does not fit: the CPU can be used all the same
        return (f"a device that cannot be asked ({describe(error)})",)


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _pairs_apart() -> tuple[tuple[int, int], ...]:
    import torch

    pairs = combinations(range(torch.cuda.device_count()), 2)
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


if __name__ == "__main__":
    print(json.dumps(asdict(_try_torch())))
