"""What a run reports once: bad samples (on_bad_sample: skip), a sentence for each set, file and reason; and what user
code has assigned in a lane.

`told` is what it has told so far, in short (`Progress.told`): whoever goes on from there does not tell it again.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import xxhash

from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD, without_numbers
from quorate.data.sampler import Source

MOST_NAMED = 10
"""So many names of what was put back are told of a run."""
PUT_BACK = "put back "
Why = tuple[int, str]
"""A sample, and what is wrong with it."""
_T = TypeVar("_T")


def news_of_samples(source: Source, told: Sequence[str], why: Sequence[Why]) -> tuple[Why, ...]:
    """Those that are of another file or reason than all that were told; as many as there is room for."""
    found = ((_sample_kind(source, text), (index, text)) for index, text in why)
    return _news(found, told, f"{source.value} like ", MOST_TOLD)


def news_of_names(told: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Of what was put back, those that the run has not named yet; of all layers that are alike one is named."""
    return _news(((_name_kind(name), name) for name in names), told, PUT_BACK, MOST_NAMED)


def _news(found: Iterable[tuple[str, _T]], told: Sequence[str], prefix: str, most: int) -> tuple[_T, ...]:
    first: dict[str, _T] = {}
    for kind, each in found:
        first.setdefault(kind, each)
    room = most - sum(each.startswith(prefix) for each in told)
    return tuple(each for kind, each in first.items() if kind not in told)[: max(0, room)]


def _sample_kind(source: Source, text: str) -> str:
    return f"{source.value} like {xxhash.xxh3_64_hexdigest(without_numbers(text).encode())}"


def _name_kind(name: str) -> str:
    return PUT_BACK + re.sub(r"\d+", "#", name)


def of_samples(
    source: Source, told: Sequence[str], bad: Sequence[int], why: Sequence[Why]
) -> tuple[list[str], tuple[str, ...]]:
    """What to tell of these, and once that there are more of them; and what is told then."""
    new, name = news_of_samples(source, told, why), source.value
    lines = [f"sample {index} of the {name} set is left out: {text}" for index, text in new]
    told = (*told, *(each for index, text in new for each in (_sample_kind(source, text), f"{name} {index}")))
    if f"{name} more" not in told and any(f"{name} {index}" not in told for index in bad):
        told = (*told, f"{name} more")
        lines.append(
            f"more samples of the {name} set are left out; one of each file and reason is shown, and "
            "`quorate show RUN --ledger` lists them all"
        )
    return lines, told


def of_names(told: Sequence[str], names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """What to tell of names that were put back, and what is told then."""
    new = news_of_names(told, names)
    if not new:
        return [], tuple(told)
    named = ", ".join(f"'{name}'" for name in new)
    sentence = (
        f"assigned while a lane or an evaluation batch runs, and put back at its end: {named}. Each may run in any "
        "worker, so nothing is kept from one to the next. What training must remember belongs in a buffer of the "
        "model; a cache stays if it is built in model() or datasets()"
    )
    return [sentence], (*told, *map(_name_kind, new))


def nothing_to_train_on(steps: int, why: Sequence[Why]) -> JobError:
    """So many steps in a row had not one sample."""
    index, text = why[0]
    which = "the last step" if steps == 1 else f"the last {steps:,} steps"
    return JobError(
        f"Not one sample of {which} could be read: all of them are bad and were left out (on_bad_sample: skip), so "
        f"there is nothing to train on. Sample {index}: {text}. Repair the files, or decode() if it raises."
    )
