"""Torch, and what it can compute on."""

from quorate.doctor.finding import Finding, Level
from quorate.doctor.requirement import Requirement
from quorate.doctor.torch_probe import TorchFacts


def check_torch(facts: TorchFacts, pinned: Requirement) -> Finding:
    """Whether it can be imported, is the version that was tested, and computes the same bits twice."""
    install = f"pip install '{pinned}'"
    if facts.error:
        return Finding("torch", Level.PROBLEM, f"cannot be used: {facts.error}", f"Install it anew: {install}")
    if not facts.repeats_bits:
        text = f"{facts.version} computes other bits the second time, with deterministic kernels and one thread"
        return Finding("torch", Level.PROBLEM, text, f"No job can keep its promise with it. {install}")
    same = "deterministic kernels give the same bits twice"
    if not pinned.accepts(facts.version):
        text = f"{facts.version}, not the {pinned.version} that Quorate is tested with; {same}"
        return Finding("torch", Level.WARNING, text, install)
    return Finding("torch", Level.OK, f"{facts.version}, as pinned; {same}")


def check_devices(facts: TorchFacts) -> Finding:
    """What torch could compute on."""
    if facts.error:
        return Finding("devices", Level.NOTE, "unknown as long as torch cannot be used")
    cpu = f"CPU ({facts.capability} kernels)"
    if not facts.cuda:
        return Finding("devices", Level.NOTE, f"{cpu} only")
    text = f"{cpu}; {', '.join(facts.cuda)} by CUDA, which this version of Quorate does not use yet"
    return Finding("devices", Level.NOTE, text)
