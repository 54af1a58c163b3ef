"""Python, packages and torch.

Torch is tried in a process of its own, ``python -m quorate.doctor.software``: one that hangs takes nobody with it.
"""

import json
import operator
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import combinations
from typing import Any

from quorate.core.gpus import driver_here, gpus_here
from quorate.core.installation import install_of
from quorate.core.processes import describe_departure
from quorate.core.user_code import describe
from quorate.doctor.report import Finding, Level
from quorate.engines.local import ENVIRONMENT
from quorate.observe.quantities import plural, size

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BOUND = re.compile(r"(==|>=|<)\s*([^\s,;)]+)")
_HOLDS = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)[\"']")
PACKAGE = "quorate"
NOT_INSTALLED = "is not installed"
FOR_DEVELOPERS = {"docs", "bench", "dev", "services"}
"""Extras for those who change Quorate itself."""


@dataclass(frozen=True)
class Requirement:
    """A package, the versions of it that will do, as pairs such as (">=", "2.11"), and the extra that needs it, if one
    does."""

    package: str
    bounds: tuple[tuple[str, str], ...] = ()
    extra: str = ""

    def accepts(self, version: str) -> bool:
        given = _release(version)
        return all(_HOLDS[relation](given, _release(bound)) for relation, bound in self.bounds)

    @property
    def versions(self) -> str:
        """The versions that will do, as they are written in the metadata."""
        return ",".join(map("".join, self.bounds))

    def __str__(self) -> str:
        return f"{self.package}{self.versions}"


def read_requirements(lines: Iterable[str]) -> list[Requirement]:
    """The requirements in a package's metadata, such as ``torch<2.14,>=2.11; extra == "examples"``."""
    requirements = []
    for line in lines:
        specifier, _, marker = line.partition(";")
        name, extra = _NAME.match(specifier.strip()), _EXTRA.search(marker)
        # The lowest first, as people write it.
        bounds = sorted(_BOUND.findall(specifier), key=lambda bound: bound[0] == "<")
        if name:
            requirements.append(Requirement(name[0], tuple(bounds), extra[1] if extra else ""))
    return requirements


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers, without zeros at their end: 2.13.0+cpu is (2, 13), and so is 2.13."""
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_installation() -> Sequence[Finding]:
    """Quorate, the system, Python, and the packages that it cannot do without."""
    needed = _needed(extra="")
    return [
        Finding(PACKAGE, Level.OK, version(PACKAGE)),
        check_system(platform.system(), platform.release(), platform.machine()),
        Finding("python", Level.OK, platform.python_version()),
        check_packages(needed),
    ]


def check_extras() -> Finding:
    """Packages that only some need."""
    extras = distribution(PACKAGE).metadata.get_all("Provides-Extra") or ()
    return judge_extras({extra: _lacking(_needed(extra)) for extra in extras if extra not in FOR_DEVELOPERS})


def _needed(extra: str) -> list[Requirement]:
    return [each for each in read_requirements(distribution(PACKAGE).requires or ()) if each.extra == extra]


def check_system(system: str, release: str, machine: str) -> Finding:
    """Workers are watched by pidfd and forked, which only Linux does as it is needed."""
    text = f"{system} {release}, {machine}"
    if system == "Linux":
        return Finding("system", Level.OK, text)
    return Finding("system", Level.PROBLEM, f"{text}; jobs run on Linux only", "Run it in a Linux container.")


def check_packages(needed: Sequence[Requirement]) -> Finding:
    """Everything that Quorate cannot do without."""
    lacking = _lacking(needed)
    if not lacking:
        return Finding("packages", Level.OK, f"all {len(needed)} that are needed are installed")
    quoted = " ".join(f"'{requirement}'" for requirement in lacking)
    return Finding("packages", Level.PROBLEM, ", ".join(lacking.values()), f"pip install {quoted}")


def judge_extras(lacking: Mapping[str, Mapping[Requirement, str]]) -> Finding:
    """Which extras are installed, which are not, and packages that are installed in another version."""
    there = [extra for extra, missing in lacking.items() if not missing]
    absent = [extra for extra, missing in lacking.items() if missing]
    wrong = {text for each in lacking.values() for text in each.values() if not text.endswith(NOT_INSTALLED)}
    parts = [f"installed: {', '.join(there)}" if there else "", f"not installed: {', '.join(absent)}" if absent else ""]
    text = "; ".join(filter(None, [*parts, *sorted(wrong)]))
    if not absent:
        return Finding("extras", Level.OK, text)
    return Finding("extras", Level.NOTE, text, f"If you want one: {install_of('NAME')}")


def _lacking(needed: Sequence[Requirement]) -> dict[Requirement, str]:
    """Those that are not installed as they should be, and how they are."""
    lacking = {}
    for each in needed:
        try:
            if not each.accepts(installed := version(each.package)):
                lacking[each] = f"{each.package} is {installed}, not {each.versions}"
        except PackageNotFoundError:
            lacking[each] = f"{each.package} {NOT_INSTALLED}"
    return lacking


# --- torch


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
    command = [sys.executable, "-P", "-m", "quorate.doctor.software"]
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

        from quorate.replica.device import CPU, canary

        CPU.pin(1, deterministic=True)
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        pairs = combinations(range(torch.cuda.device_count()), 2)
        return TorchFacts(
            version=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            repeats_bits=canary(CPU) == canary(CPU),
            cuda=_cuda_devices(),
            built_for=torch.version.cuda or "",
            nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",  # type: ignore[no-untyped-call]
            apart=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        )
    except Exception as error:
        return TorchFacts(error=describe(error))


def _cuda_devices() -> tuple[str, ...]:
    import torch

    from quorate.cuda.device import oldest_capability

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


def check_torch_here(facts: TorchFacts) -> Sequence[Finding]:
    """Torch as it is installed, and what it could compute on."""
    tested = next(each for each in _needed(extra="") if each.package == "torch")
    return [check_torch(facts, tested), check_devices(facts, len(gpus_here()), driver_here())]


def check_torch(facts: TorchFacts, tested: Requirement) -> Finding:
    """Whether it can be imported, is the version that was tested, and computes the same bits twice."""
    install = f"pip install '{tested}'"
    if facts.error:
        return Finding("torch", Level.PROBLEM, f"cannot be used: {facts.error}", f"Install it again: {install}")
    if not facts.repeats_bits:
        text = f"{facts.version} computes other bits the second time, with deterministic kernels and one thread"
        return Finding("torch", Level.PROBLEM, text, f"No job can keep its promise with it. {install}")
    same = "deterministic kernels give the same bits twice"
    if not tested.accepts(facts.version):
        text = f"{facts.version}, not the {tested.versions} that Quorate is tested with; {same}"
        return Finding("torch", Level.WARNING, text, install)
    return Finding("torch", Level.OK, f"{facts.version}, a tested version; {same}")


def check_devices(facts: TorchFacts, gpus: int = 0, driver: str = "") -> Finding:
    """What torch could compute on; of the GPUs that the kernel has, whether torch can use them."""
    if facts.error:
        return Finding("devices", Level.NOTE, "unknown as long as torch cannot be used")
    cpu = f"CPU ({facts.capability} kernels)"
    if facts.cuda:
        by = f"CUDA {facts.built_for}" + (f", driver {driver}" if driver else "")
        each = "; `workers: auto` starts one worker for each" if len(facts.cuda) > 1 else ""
        return Finding("devices", Level.NOTE, f"{cpu}; {', '.join(facts.cuda)} by {by}{each}")
    if not gpus:
        return Finding("devices", Level.NOTE, f"{cpu} only")
    text = f"{cpu} only, although this machine has {plural(gpus, 'GPU')}"
    if not facts.built_for:
        remedy = "Install a torch that is built for CUDA: see https://pytorch.org"
        return Finding("devices", Level.WARNING, f"{text}: torch {facts.version} is built without CUDA", remedy)
    text = f"{text}: the driver{f' {driver}' if driver else ''} does not answer torch (CUDA {facts.built_for})"
    return Finding(
        "devices", Level.WARNING, text, "See whether `nvidia-smi` works, and whether the driver is new enough."
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_try_torch())))
