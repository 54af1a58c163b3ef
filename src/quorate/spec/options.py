"""The table of options, how what they declare becomes part of the job file, and what the core asks of a strategy and of
an engine, whichever option they come from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, create_model

from quorate.core.addresses import has_secret, is_url, shown_place, split_address
from quorate.core.errors import Problem
from quorate.core.generation import MeshShape
from quorate.spec.keys import Allowed, Count, Fraction, Section, one_of

Bytes = tuple[int, int]
"""Sent and received."""
ANY = object()
"""In a refusal: every value but the default."""


@dataclass(frozen=True)
class Refusal:
    """A value of a key that a strategy does not go with, why, and what to do instead."""

    key: str
    value: Any
    why: str
    hint: str


class Treatment(Section):
    """What is done to gradients before they are summed: the section of a key that an option adds to a strategy."""

    factories: ClassVar[Mapping[str, str]] = {}
    """By kind of strategy what makes it with this treatment, where that is another than without."""
    cpu_only: ClassVar[bool] = False

    @property
    def keeps_residuals(self) -> bool:
        """Whether what is not sent is added to the next gradient."""
        return False


class Sealing(Section):
    """How checkpoints are encrypted: the section of a key that an option adds to `checkpoint`."""

    opened_by: ClassVar[str] = ""
    """`module:function` that makes a `Seal` of this section."""

    def secrets(self) -> Iterator[str]:
        """What must never be shown."""
        yield from ()


class StrategySection(Section):
    """A strategy in a job file, and what others have to know of it: each kind says where it differs from the ring."""

    kind: str

    factory: ClassVar[str] = ""
    """`module:function` of what makes it in a worker: called with the job, the replica and what the process holds
    besides."""
    sharding: ClassVar[str] = ""
    """`module:function` of what builds a worker's part of the model, if it holds only a part."""
    planning: ClassVar[str] = ""
    """`module:class` of what `quorate plan` shows of such a job: called with the task, the job and its mesh."""
    is_gang: ClassVar[bool] = False
    """Whether its workers exchange tensors by torch.distributed, and a loss ends the generation for all."""

    @property
    def treatments(self) -> dict[str, Treatment]:
        """What is done to gradients before they are summed, by key."""
        given = {key: getattr(self, key) for key in type(self).model_fields}
        return {key: value for key, value in given.items() if isinstance(value, Treatment)}

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What is computed besides plain sums. Strategies in which it is equal go on with each other's state."""
        return dict(self.treatments)

    @property
    def made_by(self) -> str:
        """Its factory, or that of one of its treatments."""
        return next(filter(None, (each.factories.get(self.kind) for each in self.treatments.values())), self.factory)

    @property
    def keeps_residuals(self) -> bool:
        """Whether what is not sent is added to the next gradient."""
        return any(each.keeps_residuals for each in self.treatments.values())

    @property
    def cpu_only(self) -> str | None:
        """The key for whose sake only CPUs are used; None if a GPU will do."""
        return next((f"strategy.{key}" for key, each in self.treatments.items() if each.cpu_only), None)

    @property
    def is_synchronous(self) -> bool:
        """Whether all lanes of a step are one update."""
        return True

    @property
    def fixes_bits(self) -> bool:
        """Whether its bits depend on lanes alone, and not on the number of workers either."""
        return self.is_synchronous and not self.is_gang

    @property
    def couples_passes(self) -> bool:
        """Whether workers wait for each other within a pass through the model."""
        return False

    @property
    def server_count(self) -> int:
        """How many processes a job has that hold parameters."""
        return 0

    def server_traffic(self, gradients: int, hosting: Sequence[range]) -> tuple[tuple[Bytes, ...], Bytes]:
        """What each worker, by the lanes that it hosts, and each server exchange in a step of a job with servers, whose
        gradients have so many bytes."""
        raise NotImplementedError

    def mesh(self, workers: int) -> MeshShape | None:
        """How so many workers stand to each other if each holds a part of the state; None where each holds all of it,
        or servers do."""
        return None

    def refusals(self) -> Iterator[Refusal]:
        """The values of other keys that it does not go with."""
        yield from ()


def goes_on(before: StrategySection, after: StrategySection) -> bool:
    """Whether it is another strategy that goes on with the same computation: who sums what lanes have is only manner.

    To the same bits, except with a gang, which adds in the order of its workers.
    """
    if not before.is_synchronous or not after.is_synchronous or before.arithmetic != after.arithmetic:
        return False
    # Servers that feed back what they have not sent answer with less than the ring has.
    return not before.keeps_residuals or before.kind == after.kind


class GrowSpec(Section):
    """A job starts with `min_workers` and gets more as long as each worker still has this fraction of the throughput
    that a worker had with fewer. Each number of workers is measured for some steps."""

    efficiency: Fraction = 0.6
    """The least throughput of a worker, as a fraction of what a worker had with fewer of them."""
    steps: Count = 20
    """Steps for which each number of workers is measured."""


class EngineSection(Section):
    """An engine in a job file, and what others have to know of it."""

    kind: str
    grow: GrowSpec | None = None
    """Start with `min_workers` and add workers as long as they are efficient; null: start all at once."""

    opened_by: ClassVar[str] = ""
    """`module:function` that makes the engine, if it is not the local one: called with the run, what is to be prepared,
    the job, how many processes there are at first, and what tells why the job is to end before it has begun."""
    is_cluster: ClassVar[bool] = False
    """Whether workers may run on other machines than this one."""

    @property
    def shared_storage(self) -> str | None:
        """The folder or object store that all hosts reach, for the runs."""
        return None

    @property
    def object_store(self) -> str | None:
        """The object store among these."""
        return self.shared_storage if self.shared_storage is not None and is_url(self.shared_storage) else None

    def refuse_missing(self) -> None:
        """Raise RequestError where what it needs is not installed."""

    def gpus_each(self, device: str) -> float:
        """How much of a GPU a cluster gives each worker of a job with this `device`."""
        return 0.0


class LocalSpec(EngineSection):
    """All processes run on this machine."""

    kind: Literal["local"] = "local"


# --- what jobs and searches say alike of a cluster: its address, a shared folder, and what each worker gets

RAY_CLIENT = "ray://"


def checked_address(address: str) -> str:
    """The address of a cluster. Raises ValueError that says what to write instead."""
    if address in ("auto", "local"):
        return address
    if has_secret(address):
        return address  # which a rule refuses, without showing it
    protocol, separator, rest = address.rpartition("://")
    if separator and f"{protocol}{separator}" != RAY_CLIENT:
        raise ValueError(f"Ray's own protocol is {RAY_CLIENT}: write {RAY_CLIENT}{rest}, or {rest} alone.")
    host, colon, _ = rest.rpartition(":")
    if not colon:
        port = 10001 if separator else 6379
        raise ValueError(f"Add the port, {port} where nothing else was chosen: {address}:{port}.")
    if not 0 < split_address(rest)[1] < 65536:
        raise ValueError(f"A port is from 1 to 65535: {host}:6379.")
    return address


def checked_folder(folder: str | None) -> str | None:
    """A folder that several hosts reach. Raises ValueError that says what to write instead."""
    if folder is None:
        return None
    if is_url(folder):
        raise ValueError(f"It is a folder that all hosts have mounted, and {shown_place(folder)} is none.")
    if not PurePath(folder).is_absolute():
        raise ValueError("It has to be the same on all hosts: write an absolute path, such as /mnt/shared.")
    return folder


class PerWorkerSpec(Section):
    """What Ray reserves for each worker. Null: as many CPUs as a lane has threads, and a GPU if `device: cuda`."""

    cpu: Annotated[float | None, Field(gt=0), Allowed("a number above 0, or null: as many as `threads`")] = None
    """CPUs for each worker."""
    gpu: Annotated[
        float | None,
        Field(ge=0, le=1),
        Allowed("a number from 0 to 1 (several workers may share a GPU), or null: 1 with device: cuda, else 0"),
    ] = None
    """A GPU for each worker, or a fraction of one."""


# --- the options
#
# An option is one room. Its `option.py` says in `OPTION`, without importing torch, which kinds of a section and which
# keys it adds to the job file. It names the modules of its rules and of what implements it, which are imported when a
# job uses them. Without its folder and its line in the table the rest works: its keys are unknown then.

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "quorate.strategies.gangs": ("strategy", "job"),
    "quorate.strategies.servers": ("strategy",),
    "quorate.strategies.compression": ("strategy.ring", "strategy.parameter-server"),
    "quorate.engines.ray": ("engine",),
    "quorate.encryption": ("checkpoint",),
}
"""The room of each option, and the sections of the job file that it adds to: `job` is the file itself, and
`strategy.ring` the section of that kind."""

Said = Callable[[str], str]
"""Where the value of a key was said, to stand behind it: " (--workers)"; nothing where that is not known."""
Rule = Callable[[Any, Said], Iterator[Problem]]
"""A rule between keys of a job (`JobSpec`): what does not hold."""
Rules = Mapping[Rule, frozenset[str]]
"""Each rule with its keys: it can be judged only when all of them are valid by themselves."""

SectionType = TypeVar("SectionType", bound=Section)


@dataclass(frozen=True)
class Removed:
    """A key that earlier versions had: its default then, and what to do instead. Where it had another value, what it
    went with is gone as well."""

    default: Any
    instead: str
    with_it: str = ""


@dataclass(frozen=True)
class Option:
    """What an option adds to the job file.

    `kinds` has by key the kinds of section that may stand there, `keys` by section the further keys in it, each with
    its type and its default, and `rules` say what must hold between keys. `removed` are dotted keys that recorded runs
    still have.
    """

    kinds: Mapping[str, tuple[type[Section], ...]] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, tuple[Any, Any]]] = field(default_factory=dict)
    rules: Rules = field(default_factory=dict)
    removed: Mapping[str, Removed] = field(default_factory=dict)


def options(section: str | None = None) -> Iterator[Option]:
    """All options, or those that add to a section."""
    for room, sections in OPTIONS.items():
        if section is None or section in sections:
            option = import_module(f"{room}.option").OPTION
            assert isinstance(option, Option), room
            yield option


def option_rules() -> Rules:
    """The rules of all options."""
    return {rule: keys for option in options() for rule, keys in option.rules.items()}


def removed_keys() -> dict[str, Removed]:
    """The keys that options had in earlier versions."""
    return {key: removed for option in options() for key, removed in option.removed.items()}


def open_to_options(name: str, **kinds: tuple[type[Section], ...]) -> Callable[[type[SectionType]], type[SectionType]]:
    """The section with what options add to it; `kinds` are those of the core, by the key that may hold others too."""

    def opened(section: type[SectionType]) -> type[SectionType]:
        added = {key: taken for option in options(name) for key, taken in option.keys.get(name, {}).items()}
        by_kind = {}
        for key, own in kinds.items():
            others = [kind for option in options(key) for kind in option.kinds.get(key, ())]
            by_kind[key] = _one_of_kinds(section, key, [*own, *others])
        inherited: dict[str, Any] = {"__base__": section, "__module__": section.__module__, "__doc__": section.__doc__}
        model: Any = create_model(section.__name__, **(inherited | by_kind | added))
        return cast(type[SectionType], model)

    return opened


def _one_of_kinds(section: type[Section], key: str, kinds: list[type[Section]]) -> tuple[Any, Any]:
    given = section.model_fields[key]
    names = [kind.model_fields["kind"].annotation.__args__[0] for kind in kinds]  # type: ignore[union-attr]
    allowed = Allowed(one_of([*names, "a mapping with kind"]))
    told_apart = [Field(discriminator="kind")] if len(kinds) > 1 else []
    return Annotated[(reduce(or_, kinds), *told_apart, *given.metadata, allowed)], given.default


def added(section: Section, key: str, kind: type[SectionType]) -> SectionType:
    """What stands under a key that an option has added."""
    value = getattr(section, key)
    assert isinstance(value, kind), key
    return value
