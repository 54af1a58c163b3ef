"""The GPUs of this machine, without speaking to their driver: whoever forks must not have."""

import importlib.util
import os
import re
import subprocess
from functools import cache
from pathlib import Path

_DEVICE = re.compile(r"nvidia\d+")
VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 5.0
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(\S+)", re.MULTILINE)
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", re.MULTILINE)


def gpus_here(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Those that a process may use, as `CUDA_VISIBLE_DEVICES` names them: all, or what that variable leaves of them."""
    there = sum(_DEVICE.fullmatch(path.name) is not None for path in devices.glob("nvidia*"))
    visible = os.environ.get(VISIBLE)
    if visible is None:
        # Counted, whatever the names of their files: in a container that was given nvidia3 alone, CUDA calls it 0.
        return tuple(map(str, range(there)))
    named = (part.strip() for part in visible.split(","))
    return tuple(name for name in named if name not in ("", "-1")) if there else ()


def use_gpu(name: str) -> None:
    """Have this process see no other. Before anything speaks to the driver."""
    os.environ[VISIBLE] = name


@cache
def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for GPUs: by its text, since to import it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        built_for = _CUDA.search((Path(found.origin).parent / "version.py").read_text())
    except OSError:
        return True  # of another make: whoever computes there finds out
    return built_for is None or built_for[1] != "None"


def driver_here(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the driver; empty where there is none, or where it does not tell."""
    try:
        found = _DRIVER.search(version.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def users_of(gpu: str) -> str:
    """Who computes on a GPU, the largest first: process 4711 (python) has 70,000 MiB. Empty where nvidia-smi does not
    tell, as in most containers."""
    listed = [
        [part.strip() for part in line.split(",")] for line in _ask("compute-apps=pid,process_name,used_memory", gpu)
    ]
    users = [(int(used), pid, name) for pid, name, used in (row for row in listed if len(row) == 3) if used.isdecimal()]
    return ", ".join(f"process {pid} ({Path(name).name}) has {used:,} MiB" for used, pid, name in sorted(users)[::-1])


def memory_of(gpu: str) -> int | None:
    """Bytes of a GPU's memory; None where nvidia-smi does not tell."""
    told = _ask("gpu=memory.total", gpu)
    return int(told[0]) * 2**20 if told and told[0].isdecimal() else None


def _ask(query: str, gpu: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
