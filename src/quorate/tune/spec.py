"""The keys of a search file: the job, the space, how trials are chosen and stopped, and what all of it may cost.

What a trial draws for a key depends on the seed of the search, the number of the trial and the key alone: the trials
are the same in whatever order they run, on any machine.
"""

import math
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quorate.core.digests import derive_seed
from quorate.core.errors import Problem
from quorate.spec.job import MetricName, version_check
from quorate.spec.keys import Allowed, Count, OptionalCount, OptionalPositive, Section, spelled_out
from quorate.spec.options import PerWorkerSpec, checked_address, checked_folder
from quorate.spec.problems import in_brackets

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

    def within(self, value: float) -> float:
        """A number of the range, as short as the search writes those that it draws."""
        return min(self.high, max(self.low, _rounded(value)))

    def draw(self, stream: random.Random) -> Any:
        """A value by the next number of a random stream."""
        if self.kind == "loguniform":
            drawn = math.exp(math.log(self.low) + stream.random() * (math.log(self.high) - math.log(self.low)))
            if self.step is not None:
                return self._at(min(self._steps, round((drawn - self.low) / self.step)))
            return self.within(drawn)
        values = self.values
        if values is not None:
            return values[int(stream.random() * len(values))]
        return self.within(self.low + stream.random() * (self.high - self.low))


def _rounded(value: float) -> float:
    # Logarithms differ in their last bit between mathematical libraries; besides, people read these numbers.
    return float(f"{value:.{_DIGITS}g}")


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


Mode = Literal["min", "max"]


class RandomSpec(Section):
    """Every trial draws its values by itself; keys with `grid` go through all their values."""

    kind: Literal["random"] = "random"


class GridSpec(Section):
    """All combinations of all values."""

    kind: Literal["grid"]


class OptunaSpec(Section):
    """Optuna's TPE chooses by what earlier trials came to; the first `startup_trials` are drawn."""

    kind: Literal["optuna"]
    startup_trials: Count = 10


class NoSchedulerSpec(Section):
    """Every trial trains to its end."""

    kind: Literal["none"] = "none"


class AshaSpec(Section):
    """Of the trials that have come as far as `grace` × `reduction`^n steps, the best of every `reduction` go on.

    Null: `grace` is the first evaluation.
    """

    kind: Literal["asha"]
    grace: OptionalCount = None
    reduction: Annotated[int, Field(ge=2), Allowed("a whole number of at least 2")] = 4


class HyperbandSpec(Section):
    """As ASHA, but in brackets that begin to judge at different steps."""

    kind: Literal["hyperband"]
    reduction: Annotated[int, Field(ge=2), Allowed("a whole number of at least 2")] = 3


class PbtSpec(Section):
    """Population-based training: every `interval` steps the worst `quantile` of the trials go on from checkpoints of
    the best, with params that are drawn again (with probability `resample`) or moved a little.

    Null: `interval` is that of the evaluations.
    """

    kind: Literal["pbt"]
    interval: OptionalCount = None
    quantile: Annotated[float, Field(gt=0, le=0.5), Allowed("a fraction above 0 and at most 0.5")] = 0.25
    resample: Annotated[float, Field(ge=0, le=1), Allowed("a fraction from 0 to 1")] = 0.25


AnyAlgorithm = RandomSpec | GridSpec | OptunaSpec
AnyScheduler = NoSchedulerSpec | AshaSpec | HyperbandSpec | PbtSpec


class TrialSpec(PerWorkerSpec):
    """What a trial takes: its workers, and of the machine or cluster for each of them. Null: `workers` is that of the
    job, 1 where it says auto; for the others as in `engine.per_worker`."""

    workers: OptionalCount = None


class BudgetSpec(Section):
    """How much the search may spend: trials, and minutes and steps of all of them together."""

    trials: OptionalCount = None
    minutes: OptionalPositive = None
    steps: OptionalCount = None


class SearchSpec(Section):
    """A whole search. What is left out is found in the job where that says it."""

    version: Annotated[
        Literal[1],
        BeforeValidator(version_check(1)),
        Allowed("1, the only version of the search file that this Quorate reads"),
    ] = 1
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
        Allowed("a name of letters, digits, dots, dashes and underscores (at most 100), the first a letter or digit"),
    ] = "search"
    job: Annotated[str | dict[str, Any], Allowed("the path of a job file, or a mapping of the keys of a job")] = ""
    metric: Annotated[
        MetricName | Annotated[list[MetricName], Field(min_length=1)],
        Allowed("the name of a metric, or a list of them"),
    ] = "loss"
    mode: Annotated[Mode | list[Mode] | None, Allowed("min, max, or a list of them as long as that of metric")] = None
    space: Annotated[
        dict[str, DimensionSpec] | None,
        Allowed("a mapping from keys of the job to ranges and choices, or null: one is proposed"),
    ] = None
    algorithm: Annotated[
        Annotated[AnyAlgorithm, Field(discriminator="kind")],
        BeforeValidator(spelled_out),
        Allowed("random, grid, optuna, or a mapping with kind"),
    ] = RandomSpec()
    scheduler: Annotated[
        Annotated[AnyScheduler, Field(discriminator="kind")],
        BeforeValidator(spelled_out),
        Allowed("none, asha, hyperband, pbt, or a mapping with kind"),
    ] = NoSchedulerSpec()
    concurrent: Annotated[
        int | None, Field(ge=1), Allowed("a whole number of at least 1, or null: as many as there is room for")
    ] = None
    trial: TrialSpec = TrialSpec()
    budget: BudgetSpec = BudgetSpec()
    seed: Annotated[int, Field(ge=0, lt=2**63), Allowed("a whole number of at least 0 and below 2**63")] = 0
    engine: Annotated[
        Literal["local", "ray"] | None,
        Allowed("local, ray, or null: ray for an address or pbt, else local"),
    ] = None
    address: Annotated[
        str,
        AfterValidator(checked_address),
        Allowed("local, auto, the host:port of a cluster, or ray://host:port from outside of it"),
    ] = "local"
    storage: Annotated[
        str | None,
        AfterValidator(checked_folder),
        Allowed("the absolute path of a folder that all nodes reach, or null: the search's own folder"),
    ] = None
    runs: Annotated[str, Field(min_length=1), Allowed("the path of a folder, as text")] = "runs"

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is searched for; several are told apart by a Pareto front."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def runs_on_ray(self) -> bool:
        """Whether Ray Tune runs the trials. Otherwise they are processes of this machine."""
        asks = self.address != "local" or isinstance(self.scheduler, PbtSpec)
        return asks if self.engine is None else self.engine == "ray"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Whether each of the metrics is to be small or large."""
        if isinstance(self.mode, list) and len(self.mode) == len(self.metrics):
            return tuple(self.mode)
        return (self.mode if isinstance(self.mode, str) else "min",) * len(self.metrics)

    @property
    def dimensions(self) -> dict[str, DimensionSpec]:
        """The space as the algorithm goes through it: for `grid`, each key as a grid of its values, where these have an
        end."""
        space = self.space or {}
        if not isinstance(self.algorithm, GridSpec):
            return dict(space)
        return {key: each if each.values is None else DimensionSpec(grid=each.values) for key, each in space.items()}

    @property
    def grid_size(self) -> int:
        """How many combinations there are of the keys that have `grid`; 1 if none has."""
        return math.prod(len(each.values or []) for each in self.dimensions.values() if each.kind == "grid")

    @property
    def trials(self) -> int | None:
        """How many trials there are; None where other budgets end the search."""
        kinds = {dimension.kind for dimension in self.dimensions.values()}
        counts = [self.budget.trials, self.grid_size if kinds == {"grid"} else None]
        return min((count for count in counts if count is not None), default=None)

    def params(self, trial: int) -> dict[str, Any]:
        """What a trial (1, 2, …) gets, by dotted key of the job, where that does not depend on other trials.

        Keys with `grid` go through all their combinations, the last of them fastest, and then from the beginning again;
        all others are drawn.
        """
        space, params, rest = self.dimensions, {}, trial - 1
        for key in reversed(space):
            if space[key].kind == "grid":
                values = space[key].values or []
                rest, place = divmod(rest, len(values))
                params[key] = values[place]
            else:
                params[key] = space[key].draw(random.Random(derive_seed(self.seed, "search", trial, key)))
        return {key: params[key] for key in space}
