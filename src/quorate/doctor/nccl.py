"""NCCL, by which gangs exchange tensors between GPUs: its version, the ways between GPUs and hosts, its variables."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quorate.core.errors import QuorateError
from quorate.doctor.report import Finding, Level
from quorate.doctor.software import TorchFacts
from quorate.observe.quantities import plural, some_of
from quorate.spec.load import load_recorded, resolve_mapping
from quorate.strategies.gangs.nccl import KEYS, nccl_of
from quorate.strategies.gangs.option import NcclSpec

_ANY_JOB = {"task": "task.py:Task", "batch_size": 2**40, "steps": 1}
_UNUSED = "^lo,docker"
"""What NCCL leaves out if nothing is said, as long as there is another."""
SHOWN = 4


@dataclass(frozen=True)
class Network:
    """The network interfaces of this machine, and its InfiniBand or RoCE adapters; of each whether it is up."""

    interfaces: Mapping[str, bool]
    adapters: Mapping[str, bool]

    @classmethod
    def here(cls, root: Path = Path("/sys/class")) -> "Network":
        interfaces = {each.name: _read(each / "operstate") != "down" for each in sorted(root.glob("net/*"))}
        adapters = {
            each.name: any(_read(state).endswith("ACTIVE") for state in each.glob("ports/*/state"))
            for each in sorted(root.glob("infiniband/*"))
        }
        return cls(interfaces, adapters)


def settings_of(environment: Mapping[str, str], recorded: Path | None) -> NcclSpec:
    """What a run says to NCCL; of no run in particular, what the environment has every job say."""
    # What cannot be read is told by the checks of the run and of the variables.
    with suppress(QuorateError):
        if recorded is not None:
            return nccl_of(load_recorded(recorded, {}, []).spec)
        return nccl_of(resolve_mapping(_ANY_JOB, "the environment", environment, []).spec)
    return NcclSpec()


def check_nccl(
    facts: TorchFacts, network: Network, nccl: NcclSpec, environment: Mapping[str, str]
) -> Sequence[Finding]:
    """Everything about it; a single line where there is nothing to check."""
    if facts.error:
        return []
    names = sorted(name for name in environment if name.startswith(("NCCL_", "TORCH_NCCL_")))
    variables = [check_variable(name, environment[name]) for name in names]
    if not facts.nccl:
        text = "nothing to check: there is no GPU here that torch can use, and gangs exchange tensors by Gloo"
        return [Finding("nccl", Level.NOTE, text), *variables]
    interface = nccl.interface or environment.get("NCCL_SOCKET_IFNAME")
    adapter = nccl.infiniband
    if adapter is None:
        is_off = environment.get("NCCL_IB_DISABLE", "0") != "0"
        adapter = False if is_off else environment.get("NCCL_IB_HCA")
    return [
        check_gpus(facts),
        check_interfaces(network.interfaces, interface),
        check_adapters(network.adapters, adapter),
        *variables,
    ]


def check_gpus(facts: TorchFacts) -> Finding:
    """The version, and whether the GPUs of this host reach each other without a detour."""
    count = len(facts.cuda)
    if count == 1:
        return Finding("nccl", Level.OK, f"{facts.nccl}; with one GPU there is no way between GPUs here to check")
    if not facts.apart:
        return Finding("nccl", Level.OK, f"{facts.nccl}; all {count} GPUs reach each other directly (P2P)")
    pairs = some_of([f"{one} and {other}" for one, other in facts.apart], SHOWN)
    text = f"{facts.nccl}; {plural(len(facts.apart), 'pair')} of {count} GPUs cannot reach each other directly: {pairs}"
    remedy = (
        "What they exchange goes through the host's memory. `nvidia-smi topo -p2p r` says why; often it is the IOMMU, "
        "ACS of a PCIe switch, or a virtual machine."
    )
    return Finding("nccl", Level.WARNING, text, remedy)


def check_interfaces(interfaces: Mapping[str, bool], wanted: str | None) -> Finding:
    """Whether there is an interface that NCCL would use between hosts."""
    chosen = [name for name in interfaces if is_meant(name, wanted or _UNUSED)]
    up = [name for name in chosen if interfaces[name]]
    name, there = "nccl interface", some_of(list(interfaces), SHOWN) or "none at all"
    if wanted and not chosen:
        text = f"nccl.interface: {wanted} is the name of no interface here; there are {there}"
        return Finding(name, Level.PROBLEM, text, "Name one of them; the hosts of a job may have several, with commas.")
    if wanted and not up:
        return Finding(name, Level.PROBLEM, f"{', '.join(chosen)} is down", "Have it set up, or name another.")
    if not up:
        text = f"no interface but {there} is up: jobs on this host alone can run"
        return Finding(name, Level.NOTE, text)
    why = f"as nccl.interface: {wanted} says" if wanted else "NCCL takes the first that reaches the others"
    return Finding(name, Level.OK, f"{some_of(up, SHOWN)}: {why}")


def check_adapters(adapters: Mapping[str, bool], wanted: bool | str | None) -> Finding:
    """Whether hosts can exchange by InfiniBand or RoCE, and do where they can."""
    name = "nccl infiniband"
    active = [adapter for adapter, is_active in adapters.items() if is_active]
    if wanted is False:
        left = f", although {some_of(active, SHOWN)} is active" if active else ""
        level = Level.NOTE if active else Level.OK
        return Finding(name, level, f"switched off: hosts exchange over TCP{left}")
    if not adapters:
        if wanted is None:
            text = "no adapter here: hosts exchange over TCP, and there is nothing to check"
            return Finding(name, Level.NOTE, text)
        text = f"nccl.infiniband: {'true' if wanted is True else wanted}, and this host has no adapter"
        remedy = "Leave it out. In a container, its devices have to be given: docker run --device /dev/infiniband"
        return Finding(name, Level.PROBLEM, text, remedy)
    meant = [adapter for adapter in adapters if not isinstance(wanted, str) or is_meant(adapter, wanted)]
    if not meant:
        text = f"nccl.infiniband: {wanted} is the name of no adapter here; there are {some_of(list(adapters), SHOWN)}"
        return Finding(name, Level.PROBLEM, text, "Name one of them.")
    if used := [adapter for adapter in meant if adapter in active]:
        return Finding(name, Level.OK, f"{some_of(used, SHOWN)}: active")
    text = f"{some_of(meant, SHOWN)}: no port is active, and hosts exchange over TCP"
    return Finding(name, Level.WARNING, text, "Look at `ibstat`: the cable, the switch, and its subnet manager.")


def check_variable(name: str, value: str) -> Finding:
    """A variable of the shell that NCCL reads."""
    key = KEYS.get(name)
    if key is None:
        return Finding(name, Level.NOTE, f"set to {value}: workers pass it on to NCCL as it is")
    text = f"set to {value}: it holds for jobs that do not say `{key}`"
    if name == "NCCL_ALGO":
        text = f"set to {value}: it holds for jobs with `deterministic: false` that do not say `{key}`"
    return Finding(
        name, Level.NOTE, text, f"Say it in the job file instead ({key}): then it is written down in the run."
    )


def is_meant(name: str, listed: str) -> bool:
    """Whether NCCL would take a list of names for this one: beginnings of names, whole ones after `=`, and none of them
    after `^`. A port behind a colon says nothing of the name."""
    is_excluding, listed = listed.startswith("^"), listed.removeprefix("^")
    is_whole, listed = listed.startswith("="), listed.removeprefix("=")
    names = [each.strip().partition(":")[0] for each in listed.split(",")]
    return any(name == each if is_whole else name.startswith(each) for each in names) is not is_excluding


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
