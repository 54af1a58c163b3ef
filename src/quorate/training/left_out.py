"""What is said of bad samples that a job leaves out (on_bad_sample: skip), and when there is no job left to do."""

from collections.abc import Sequence

from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD
from quorate.data.reading import Source

Why = tuple[int, str]
"""A sample, and what is wrong with it."""

_MORE = "more samples are left out; `quorate show RUN --ledger` lists them"


def worth_telling(why: Sequence[Why], before: int, has_samples: bool) -> tuple[Why, ...]:
    """What travels of a lane's bad samples, where the run had so many before: the reasons of the first of a run, and of
    one where a lane has nothing else, since that may be what ends the job."""
    return tuple(why[: max(MOST_TOLD - before, 0 if has_samples else 1)])


def warnings_of(source: Source, before: int, bad: Sequence[int], why: Sequence[Why]) -> list[str]:
    """A sentence for each of the first bad samples of a run, and one where more follow."""
    told = [
        f"sample {index} of the {source.value} set is left out: {text}"
        for index, text in why[: max(MOST_TOLD - before, 0)]
    ]
    return [*told, _MORE] if before <= MOST_TOLD < before + len(bad) else told


def nothing_to_train_on(steps: int, why: Sequence[Why]) -> JobError:
    """So many steps in a row had not one sample."""
    index, text = why[0]
    which = "the last step" if steps == 1 else f"the last {steps:,} steps"
    return JobError(
        f"Not one sample of {which} could be read: all of them are bad and were left out (on_bad_sample: skip), so "
        f"there is nothing to train on. Sample {index}: {text}. Mend the files, or decode() if it raises."
    )
