"""The GPUs of this machine, without asking their driver: whoever forks must not have spoken to it."""

import os
import re
from pathlib import Path

_DEVICE = re.compile(r"nvidia(\d+)")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Those that a process may use, as `CUDA_VISIBLE_DEVICES` names them: all, or what that variable leaves of them."""
    found = (_DEVICE.fullmatch(path.name) for path in devices.glob("nvidia*"))
    numbers = sorted(int(name[1]) for name in found if name is not None)
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return tuple(map(str, numbers))
    named = (part.strip() for part in visible.split(","))
    return tuple(name for name in named if name not in ("", "-1")) if numbers else ()


def use_gpu(name: str) -> None:
    """Have this process see no other. Before anything speaks to the driver."""
    os.environ[VISIBLE] = name
