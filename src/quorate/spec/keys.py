"""The keys of a model as a table, by dotted path: what each takes, what is noted on it beside its type, and which is
nearest to a misspelt one; and what sections are made of."""

import contextlib
import difflib
import re
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

_PLAIN_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    NoneType: "null",
}


PREFIX = "QUORATE_"
"""How the names of variables begin that set keys of a job."""


class Absent(Enum):
    """A key that was not given."""

    NOT_GIVEN = "not given"

    def __str__(self) -> str:
        return self.value


class Mark(StrEnum):
    """Whether a key changes what a job produces."""

    MEANING = "affects results"
    MANNER = "runtime only"  # how the job runs, never what it produces
    LABEL = "name only"  # never compared


@dataclass(frozen=True)
class Allowed:
    """What a key takes, worded to follow "is not": "a whole number of at least 1"."""

    text: str


@dataclass(frozen=True)
class Key:
    """One key and what it takes.

    `allowed` says it in words, and `complete` whether those words cover its limits and its content too; `alternatives`
    counts the types to choose from, and `choices` are the words to choose from. `mark` is its own, or its section's.
    """

    path: str
    allowed: str
    complete: bool
    alternatives: int
    choices: tuple[str, ...]
    mark: Mark | None = None


def keys_of(model: type[BaseModel], prefix: str = "", mark: Mark | None = None) -> dict[str, Key]:
    """Every key of a model and of the sections in it."""
    keys: dict[str, Key] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        parts = _parts(field.annotation)
        notes = [note.text for note in field.metadata if isinstance(note, Allowed)]
        allowed = notes[0] if notes else one_of([words for part in parts for words in _in_words(part)])
        own = next((note for note in field.metadata if isinstance(note, Mark)), mark)
        words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        choices = tuple(word for word in words if isinstance(word, str))
        keys[path] = Key(path, allowed, bool(notes), sum(part is not NoneType for part in parts), choices, own)
        for section in filter(_is_section, parts):
            for inner, key in keys_of(section, path, own).items():
                keys[inner] = _either(keys[inner], key) if inner in keys else key
    return keys


def _either(one: Key, other: Key) -> Key:
    """A key that several kinds of a section have, above all `kind` itself."""
    choices = (*one.choices, *other.choices)
    allowed = one_of(list(choices)) if choices else one.allowed
    return replace(one, allowed=allowed, complete=one.complete or bool(choices), choices=choices)


def one_of(words: list[str]) -> str:
    """A list in English: a, b or c."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def nearest(word: str, words: list[str]) -> list[str]:
    """The word that was probably meant, if one is near enough."""
    return difflib.get_close_matches(word, words, n=1)


def nearest_file(name: str, names: list[str]) -> list[str]:
    """The file that was probably meant: its ending says nothing, since all of one kind share it."""
    by_stem = {other.rpartition(".")[0]: other for other in sorted(names)}
    return [by_stem[stem] for stem in nearest(name.rpartition(".")[0], list(by_stem))]


CALLED_ELSEWHERE = {
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "max_train_steps", "num_training_steps"), "steps"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("save_steps", "save_every", "every_n_train_steps"), "checkpoint.every"),
    **dict.fromkeys(("save_total_limit", "save_top_k"), "checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "val_check_interval"), "evaluate.every"),
    **dict.fromkeys(("devices", "num_processes", "nproc_per_node"), "workers"),
    **dict.fromkeys(("fp16", "bf16", "mixed_precision"), "precision"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "loader_workers"),
    "accelerator": "device",
    "warmup_steps": "schedule.warmup",
    "lr_scheduler_type": "schedule.kind",
}
"""By the names of Hugging Face's and Lightning's arguments, what they are called in a job file."""


def suggestions(path: str, keys: dict[str, Key]) -> list[str]:
    """The paths that were probably meant by an unknown one: what another library calls so, the same key in another
    place, or the nearest word."""
    parent, _, name = path.rpartition(".")
    if not parent and CALLED_ELSEWHERE.get(name) in keys:
        return [CALLED_ELSEWHERE[name]]
    elsewhere = [known for known in keys if known.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere
    if beside := nearest(name, beside_names(parent, keys)):
        return [f"{parent}.{beside[0]}" if parent else beside[0]]
    anywhere = nearest(name, [known.rpartition(".")[2] for known in keys])
    return [known for known in keys if known.rpartition(".")[2] in anywhere]


def beside_names(parent: str, keys: dict[str, Key]) -> list[str]:
    """The names of the keys directly under a path."""
    return [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == parent]


def _parts(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself, without notes."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [part for member in get_args(annotation) for part in _parts(member)]
    return [annotation]


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _in_words(part: Any) -> list[str]:
    if get_origin(part) is Literal:
        return [str(choice) for choice in get_args(part)]
    if _is_section(part):
        return [f"a mapping of {', '.join(part.model_fields)}"]
    kind = get_origin(part) or part
    return [_PLAIN_TYPES.get(kind, f"a {getattr(kind, '__name__', kind)}")]


# --- what the sections of a job file are made of

Count = Annotated[int, Field(ge=1), Allowed("a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0), Allowed("a whole number of at least 0")]
OptionalCount = Annotated[int | None, Field(ge=1), Allowed("a whole number of at least 1, or null")]
Positive = Annotated[float, Field(gt=0), Allowed("a number above 0")]
Fraction = Annotated[float, Field(gt=0, le=1), Allowed("a fraction above 0 and at most 1")]
OptionalPositive = Annotated[float | None, Field(gt=0), Allowed("a number above 0, or null")]

FOLDER = "folder"
"""The context of a validation in which paths are made absolute: a run that is resumed elsewhere must find them too."""


def _placed(path: str, info: ValidationInfo) -> str:
    with contextlib.suppress(RuntimeError):  # a home that nobody has
        return str(info.context[FOLDER].absolute() / Path(path).expanduser()) if path and info.context else path
    return path


FilePath = Annotated[str, AfterValidator(_placed)]
"""A file or folder, relative to the job file."""

VERSION: Final = 2
"""Of the job files that this Quorate writes."""
AUTO = "auto"
AUTO_BATCH = 2**62
"""Stands for `batch_size: auto` until a number is found, before the run has its folder: nothing is trained with it."""


_SMALLER = re.compile(r"loss|error|perplexity|mae|mse|rmse", re.IGNORECASE)
_LARGER = re.compile(r"acc|accuracy|top\d*|f1|auc|recall|precision|iou|map|bleu|score|reward|r2", re.IGNORECASE)


def usual_mode(metric: Any) -> str | None:
    """Whether of a metric with such a name smaller ("min") or larger ("max") values are better; None if it does not
    say."""
    words = re.split(r"[\W_]+", str(metric))
    if any(_SMALLER.fullmatch(word) for word in words):
        return "min"
    return "max" if any(_LARGER.fullmatch(word) for word in words) else None


def spelled_out(section: Any) -> Any:
    """A section that has kinds, and is given by its kind alone."""
    return {"kind": section} if isinstance(section, str) else section


class Section(BaseModel):
    """A mapping of known keys, whose values are taken as they are written: no "3" for 3, no true for 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
