"""What a run reports of its bad samples (on_bad_sample: skip): a sentence for each set, file and reason.

`told` is what it has told so far, in short (`Progress.told`): whoever goes on from there does not tell it again.
"""

from collections.abc import Sequence

import xxhash

from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD, without_numbers
from quorate.data.sampler import Source

Why = tuple[int, str]
"""A sample, and what is wrong with it."""


def news(source: Source, told: Sequence[str], why: Sequence[Why]) -> tuple[Why, ...]:
    """Those that are of another file or reason than all that were told; as many as there is room for."""
    first: dict[str, Why] = {}
    for index, text in why:
        first.setdefault(_kind(source, text), (index, text))
    room = MOST_TOLD - sum(each.startswith(f"{source.value} like ") for each in told)
    return tuple(each for kind, each in first.items() if kind not in told)[: max(0, room)]


def sentences(
    source: Source, told: Sequence[str], bad: Sequence[int], why: Sequence[Why]
) -> tuple[list[str], tuple[str, ...]]:
    """What to tell of these, and once that there are more of them; and what is told then."""
    new, name = news(source, told, why), source.value
    lines = [f"sample {index} of the {name} set is left out: {text}" for index, text in new]
    told = (*told, *(each for index, text in new for each in (_kind(source, text), f"{name} {index}")))
    if f"{name} more" not in told and any(f"{name} {index}" not in told for index in bad):
        told = (*told, f"{name} more")
        lines.append(
            f"more samples of the {name} set are left out; one of each file and reason is shown, and "
            "`quorate show RUN --ledger` lists them all"
        )
    return lines, told


def _kind(source: Source, text: str) -> str:
    return f"{source.value} like {xxhash.xxh3_64_hexdigest(without_numbers(text).encode())}"


def nothing_to_train_on(steps: int, why: Sequence[Why]) -> JobError:
    """So many steps in a row had not one sample."""
    index, text = why[0]
    which = "the last step" if steps == 1 else f"the last {steps:,} steps"
    return JobError(
        f"Not one sample of {which} could be read: all of them are bad and were left out (on_bad_sample: skip), so "
        f"there is nothing to train on. Sample {index}: {text}. Repair the files, or decode() if it raises."
    )
