"""Torch, looked at in a process of its own: one that hangs or dies while it is imported takes nobody with it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from quorate.core.processes import describe_departure
from quorate.core.user_code import describe
from quorate.engines.fork_server_process import ENVIRONMENT


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself; with an `error`, nothing else of it is known."""

    error: str = ""
    version: str = ""
    capability: str = ""
    repeats_bits: bool = False
    cuda: tuple[str, ...] = ()


def probe_torch(patience: float) -> TorchFacts:
    """Start the process, with the environment that workers have, and read what it says."""
    command = [sys.executable, "-P", "-m", "quorate.doctor.torch_probe"]
    environment = {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"its import has not ended within {patience:g} s")
    return _read(done.stdout, done.returncode)


def _read(stdout: bytes, code: int) -> TorchFacts:
    # The last line: torch or a plug-in of it may have said something before.
    try:
        fields: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return TorchFacts(**{**fields, "cuda": tuple(fields["cuda"])})
    except (IndexError, ValueError, KeyError, TypeError):
        return TorchFacts(error=f"the process that imported it {describe_departure(code)}")


def look_at_torch() -> TorchFacts:
    """Import torch, and compute the same twice."""
    try:
        import torch

        from quorate.training.device import CPU, canary

        CPU.pin(1, deterministic=True)
        return TorchFacts(
            version=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            repeats_bits=canary(CPU) == canary(CPU),
            cuda=_cuda_devices(),
        )
    except Exception as error:
        return TorchFacts(error=describe(error))


def _cuda_devices() -> tuple[str, ...]:
    import torch

    try:
        return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    except Exception as error:  # of a driver that does not fit: the CPU can be used all the same
        return (f"a device that cannot be asked ({describe(error)})",)


if __name__ == "__main__":
    print(json.dumps(asdict(look_at_torch())))
