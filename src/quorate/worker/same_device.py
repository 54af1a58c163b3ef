"""Whether a run that goes on is computed by what it was computed by until then."""

from collections.abc import Mapping
from typing import Any

# The launcher compares the rest. It has not spoken to the GPU's driver, and has compiled nothing.
_KNOWN_BY_WORKERS = ("precision", "gpu", "gpu capability", "cuda", "cudnn", "attention", "compiled")


def device_changes(run: str, recorded: Mapping[str, Any], present: Mapping[str, str]) -> list[str]:
    """What is to be told of a device that computes otherwise than when a checkpoint was saved, such as one whose trial
    of compiling has come out otherwise. What an earlier version, or another kind of device, has not recorded is not
    compared."""
    both = [name for name in _KNOWN_BY_WORKERS if name in recorded and name in present]
    return [
        f"{name} was {recorded[name]} when run {run} was saved and is {present[name]} now: the bits may differ"
        for name in both
        if str(recorded[name]) != present[name]
    ]
