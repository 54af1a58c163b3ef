"""The table of options, and how what they declare becomes part of the job file.

An option is one room. Its `option.py` says in `OPTION`, without importing torch, which kinds of a section and which
keys it adds to the job file, and which rules hold between them. It names the modules of what implements it, which are
imported when a job uses them. Without its folder and its line in the table the rest works: its keys are unknown then.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, TypeVar, cast

from pydantic import Field, create_model

from quorate.core.errors import Problem
from quorate.spec.keys import Allowed, Section, one_of

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
