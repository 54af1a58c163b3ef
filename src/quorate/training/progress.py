"""How far a job has come and what its evaluations said: the part of the state that is not tensors."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quorate.core.cursor import Cursor, Phase
from quorate.core.errors import MetricError
from quorate.data.ledger import NOTHING, Tally
from quorate.spec.job import EarlyStopSpec, EvaluateSpec


@dataclass(frozen=True)
class Best:
    """The best value of a metric so far, and when it was."""

    value: float
    step: int


@dataclass(frozen=True)
class Progress:
    """A value: each step and each evaluation makes the next one."""

    cursor: Cursor = field(default_factory=Cursor)
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: Best | None = None
    patience_best: Best | None = None
    waited: int = 0
    early_stopped: bool = False
    # Of every sample that has gone into the state so far: the ledger of the run is held against it.
    tally: Tally = NOTHING
    # Samples that were left out as bad: of the training set so far, and of the validation set in the last evaluation.
    bad: int = 0
    bad_evaluated: int = 0
    # So many steps in a row up to this one had no sample, since all of theirs are bad.
    barren: int = 0
    # What was said of bad samples, in short, so that it is said once: `left_out.Telling`.
    told: tuple[str, ...] = ()

    def after_step(self, samples: int, tally: Tally = NOTHING, *, bad: int = 0, is_barren: bool = False) -> "Progress":
        """One more step of so many samples, which these are, and so many bad ones."""
        # Spelled out: it is made at every step, and `replace` takes four times as long.
        return Progress(
            self.cursor.trained(),
            self.samples + samples,
            self.metrics,
            self.best,
            self.patience_best,
            self.waited,
            self.early_stopped,
            self.tally + tally,
            self.bad + bad,
            self.bad_evaluated,
            self.barren + 1 if is_barren else 0,
            self.told,
        )

    def after_evaluation(
        self, metrics: dict[str, float], evaluate: EvaluateSpec, early_stop: EarlyStopSpec | None, bad: int = 0
    ) -> "Progress":
        """An evaluation that left out so many samples, and what follows from it: best metric, patience, early stop."""
        step = self.cursor.step
        best = self.best
        watched = evaluate.metric or ("loss" if "loss" in metrics else None)
        if watched is not None:
            best = _better(best, metric_of(metrics, watched, "evaluate.metric"), step, evaluate.mode)
        after = replace(self, cursor=self.cursor.evaluated(), metrics=metrics, best=best, bad_evaluated=bad)
        if early_stop is None:
            return after
        value = metric_of(metrics, early_stop.metric, "early_stop.metric")
        patience_best = _better(self.patience_best, value, step, early_stop.mode)
        waited = 0 if patience_best is not self.patience_best else self.waited + 1
        return replace(after, patience_best=patience_best, waited=waited, early_stopped=waited >= early_stop.patience)

    @property
    def is_best(self) -> bool:
        """Whether this is the state of the best evaluation so far: a fact of the state, on which all workers agree."""
        return self.best is not None and self.cursor == Cursor(self.best.step, Phase.EVALUATED)

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        cursor = [self.cursor.step, int(self.cursor.phase)]
        return asdict(self) | {"cursor": cursor, "tally": str(self.tally), "told": list(self.told)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Progress":
        """From a checkpoint."""
        step, phase = fields["cursor"]
        best, patience_best = (Best(**fields[key]) if fields[key] else None for key in ("best", "patience_best"))
        return cls(
            **fields
            | {
                "cursor": Cursor(step, Phase(phase)),
                "best": best,
                "patience_best": patience_best,
                "tally": Tally.from_hex(fields["tally"]),
                "told": tuple(fields.get("told", ())),
            }
        )


def _better(best: Best | None, value: float, step: int, mode: str) -> Best | None:
    if best is None:
        return None if math.isnan(value) else Best(value, step)
    improved = value < best.value if mode == "min" else value > best.value
    return Best(value, step) if improved else best


def metric_of(metrics: Mapping[str, float], name: str, key: str) -> float:
    """The metric that a key of the job file names."""
    if name not in metrics:
        near = "".join(f" Did you mean {meant}?" for meant in difflib.get_close_matches(name, metrics, n=1))
        given = ", ".join(metrics) or "none"
        raise MetricError(f"{key}: there is no metric '{name}'; metrics() gives {given}.{near}")
    return metrics[name]
