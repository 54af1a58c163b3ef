"""The space of a search: what each key of the job may be, and which values a trial gets.

What a trial draws for a key depends on the seed of the search, the number of the trial and the key alone: the trials
are the same in whatever order they run, on any machine.
"""

import math
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from quorate.core.digests import derive_seed
from quorate.core.errors import Problem
from quorate.spec.keys import Allowed
from quorate.spec.problems import in_brackets
from quorate.spec.section import Section

Range = Annotated[list[float] | None, Field(min_length=2, max_length=2), Allowed("two numbers, [lowest, highest]")]
WholeRange = Annotated[
    list[int] | None, Field(min_length=2, max_length=2), Allowed("two whole numbers, [lowest, highest]")
]
Values = Annotated[list[Any] | None, Field(min_length=1), Allowed("a list of one value at least")]
Kind = Literal["uniform", "loguniform", "randint", "choice", "grid"]

RANGES: tuple[Kind, ...] = ("uniform", "loguniform", "randint")
KINDS: tuple[Kind, ...] = (*RANGES, "choice", "grid")
_DIGITS = 6
_SLACK = 1e-9


class DimensionSpec(Section):
    """What one key of the job may be: a range, both ends included, or a list of values. Exactly one of them is given.

    With `step` a range has only the values lowest, lowest + step, lowest + 2 × step, …
    """

    uniform: Range = None
    loguniform: Range = None
    randint: WholeRange = None
    choice: Values = None
    grid: Values = None
    step: Annotated[int | float | None, Field(gt=0), Allowed("a number above 0, or null")] = None

    @property
    def kinds(self) -> list[Kind]:
        """What is given: one, unless it is a mistake."""
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    @property
    def kind(self) -> Kind:
        """Which of the ways to draw a value it is."""
        return self.kinds[0]

    @property
    def low(self) -> float:
        """The lowest value of a range."""
        return float(self._ends[0])

    @property
    def high(self) -> float:
        """The highest value of a range, which may be drawn."""
        return float(self._ends[1])

    @property
    def is_log(self) -> bool:
        """Whether equal ratios are equally likely."""
        return self.kind == "loguniform"

    @property
    def values(self) -> list[Any] | None:
        """All values that there are, in order; None where there is no end of them."""
        if self.kind not in RANGES:
            return list(getattr(self, self.kind))
        if self.kind == "randint":
            return list(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        return None if self.step is None else [self._at(number) for number in range(self._steps + 1)]

    @property
    def probes(self) -> list[Any]:
        """The values that tell whether the job takes them all: of a range its ends, of a list each."""
        return list(self._ends) if self.kind in RANGES else list(getattr(self, self.kind))

    @property
    def _ends(self) -> list[Any]:
        ends: list[Any] = getattr(self, self.kind)
        return ends

    @property
    def _steps(self) -> int:
        return math.floor((self.high - self.low) / (self.step or 1) + _SLACK)

    def _at(self, number: int) -> float:
        return min(self.high, _rounded(self.low + number * (self.step or 0)))

    def draw(self, stream: random.Random) -> Any:
        """A value by the next number of a random stream."""
        if self.kind == "loguniform":
            drawn = math.exp(math.log(self.low) + stream.random() * (math.log(self.high) - math.log(self.low)))
            if self.step is not None:
                return self._at(min(self._steps, round((drawn - self.low) / self.step)))
            return min(self.high, max(self.low, _rounded(drawn)))
        values = self.values
        if values is not None:
            return values[int(stream.random() * len(values))]
        return min(self.high, max(self.low, _rounded(self.low + stream.random() * (self.high - self.low))))


Space = Mapping[str, DimensionSpec]
"""By dotted key of the job."""


def _rounded(value: float) -> float:
    # Logarithms differ in their last bit between mathematical libraries; besides, people read these numbers.
    return float(f"{value:.{_DIGITS}g}")


def sample(space: Space, seed: int, trial: int) -> dict[str, Any]:
    """What a trial (1, 2, …) of a random search gets. Keys with `grid` go through all their combinations, the last of
    them fastest, and then from the beginning again; all others are drawn."""
    params = {}
    rest = trial - 1
    for key in reversed(list(space)):
        if space[key].kind == "grid":
            values = space[key].values or []
            rest, place = divmod(rest, len(values))
            params[key] = values[place]
        else:
            params[key] = space[key].draw(random.Random(derive_seed(seed, "search", trial, key)))
    return {key: params[key] for key in space}


def grid_size(space: Space) -> int:
    """How many combinations there are of the keys that have `grid`; 1 if none has."""
    return math.prod(len(dimension.values or []) for dimension in space.values() if dimension.kind == "grid")


def as_grid(space: Space) -> dict[str, DimensionSpec]:
    """The space with every key as a grid of its values; one that has no end of them stays as it is."""
    return {
        key: dimension if dimension.values is None else DimensionSpec(grid=dimension.values)
        for key, dimension in space.items()
    }


def dimension_problems(path: str, dimension: DimensionSpec, origin: str) -> Iterator[Problem]:
    """What is wrong with a key of the space by itself."""
    said, kinds = in_brackets(origin), dimension.kinds
    if len(kinds) != 1:
        given = f"{' and '.join(kinds)} are given" if kinds else "it does not say which values there are"
        yield Problem(path, f"{given}{said}", f"Give one of {', '.join(KINDS)}.")
        return
    if dimension.kind in RANGES:
        yield from _range_problems(path, dimension, said)
        return
    if dimension.step is not None:
        yield Problem(f"{path}.step", f"a {dimension.kind} has its own values{said}", "Leave step out.")
    spelled = [repr(value) for value in dimension.probes]
    if twice := [text for index, text in enumerate(spelled) if text in spelled[:index]]:
        yield Problem(path, f"{twice[0]} stands there twice{said}", "Name every value once.")


def _range_problems(path: str, dimension: DimensionSpec, said: str) -> Iterator[Problem]:
    kind, low, high, step = dimension.kind, dimension.low, dimension.high, dimension.step
    path = f"{path}.{kind}"
    if kind == "loguniform" and low <= 0:
        yield Problem(path, f"a logarithmic range begins above 0, and not at {low:g}{said}", "Write [1e-5, 1e-1].")
    if low >= high:
        hint = f"Write [{high:g}, {low:g}]." if low > high else f"Write choice: [{low:g}], or set it in the job."
        crossed = "the lowest value is above the highest" if low > high else "the range has only one value"
        yield Problem(path, f"{crossed}: {low:g} {'>' if low > high else '='} {high:g}{said}", hint)
    elif step is not None and kind == "randint" and step != int(step):
        yield Problem(path, f"a step of {step:g} leads away from whole numbers{said}", "Use a whole number for step.")
    elif step is not None and abs((high - low) / step - round((high - low) / step)) > _SLACK * (high - low) / step:
        last = low + math.floor((high - low) / step) * step
        hint = f"Write [{low:g}, {last:g}], or another step."
        if last == low:
            hint = f"Use a step of at most {high - low:g}."
        yield Problem(path, f"steps of {step:g} from {low:g} do not meet {high:g}{said}", hint)
