"""The keys of a search file: the job, the space, how trials are chosen and stopped, and what all of it may cost."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quorate.engines.ray.option import PerWorkerSpec, checked_address, checked_folder
from quorate.spec.job import MetricName, version_check
from quorate.spec.keys import Allowed
from quorate.spec.section import Count, OptionalCount, OptionalPositive, Section, spelled_out
from quorate.spec.space import DimensionSpec, as_grid, grid_size, sample

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
        """The space as the algorithm goes through it."""
        space = self.space or {}
        return as_grid(space) if isinstance(self.algorithm, GridSpec) else dict(space)

    @property
    def trials(self) -> int | None:
        """How many trials there are; None where other budgets end the search."""
        space = self.dimensions
        is_finite = bool(space) and all(dimension.kind == "grid" for dimension in space.values())
        counts = [self.budget.trials, grid_size(space) if is_finite else None]
        return min((count for count in counts if count is not None), default=None)

    def params(self, trial: int) -> dict[str, Any]:
        """What a trial (1, 2, …) gets, by dotted key of the job, where that does not depend on other trials."""
        return sample(self.dimensions, self.seed, trial)
