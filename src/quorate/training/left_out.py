"""What is said of bad samples that a job leaves out (on_bad_sample: skip), and when there is no job left to do."""

from collections.abc import Sequence

import xxhash

from quorate.core.errors import JobError
from quorate.data.bad_sample import MOST_TOLD, without_numbers
from quorate.data.sampler import Source

Why = tuple[int, str]
"""A sample, and what is wrong with it."""


class Telling:
    """What a run tells of the bad samples of a set: one sentence for each file and reason, and no more than a few.

    `told` is what it has told so far, of any set, in short: whoever goes on from there does not tell it again.
    """

    def __init__(self, source: Source, told: Sequence[str]) -> None:
        self._set = source.value
        self.told = tuple(told)

    def news(self, why: Sequence[Why]) -> tuple[Why, ...]:
        """Those that are of another file or reason than all that were told; as many as there is room for."""
        first: dict[str, Why] = {}
        for index, text in why:
            first.setdefault(self._kind(text), (index, text))
        room = MOST_TOLD - sum(each.startswith(self._kind()) for each in self.told)
        return tuple(each for kind, each in first.items() if kind not in self.told)[: max(0, room)]

    def sentences(self, bad: Sequence[int], why: Sequence[Why]) -> list[str]:
        """What to tell of these, and once that there are more of them; all of it counts as told then."""
        news = self.news(why)
        lines = [f"sample {index} of the {self._set} set is left out: {text}" for index, text in news]
        self.told += tuple(name for index, text in news for name in (self._kind(text), self._sample(index)))
        more = f"{self._set} more"
        if more not in self.told and any(self._sample(index) not in self.told for index in bad):
            self.told += (more,)
            lines.append(
                f"more samples of the {self._set} set are left out; one of each file and reason is told, and "
                "`quorate show RUN --ledger` lists them all"
            )
        return lines

    def _kind(self, text: str | None = None) -> str:
        return f"{self._set} like " + ("" if text is None else xxhash.xxh3_64_hexdigest(without_numbers(text).encode()))

    def _sample(self, index: int) -> str:
        return f"{self._set} {index}"


def worth_telling(told: Sequence[str], why: Sequence[Why], has_samples: bool) -> tuple[Why, ...]:
    """What travels of a lane's bad samples: what the run has not told yet, and the reason of one where a lane has
    nothing else, since that may be what ends the job."""
    return Telling(Source.TRAINING, told).news(why) or tuple(why[: 0 if has_samples else 1])


def nothing_to_train_on(steps: int, why: Sequence[Why]) -> JobError:
    """So many steps in a row had not one sample."""
    index, text = why[0]
    which = "the last step" if steps == 1 else f"the last {steps:,} steps"
    return JobError(
        f"Not one sample of {which} could be read: all of them are bad and were left out (on_bad_sample: skip), so "
        f"there is nothing to train on. Sample {index}: {text}. Mend the files, or decode() if it raises."
    )
