"""How far a job has come, what its evaluations said, which bad samples it has reported: the state besides tensors."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quorate.core.errors import MetricError
from quorate.core.generation import Cursor, Phase
from quorate.data.ledger import NOTHING, Tally
from quorate.data.sampler import MicroBatchChanges
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
    # The best without an evaluation that is there only because the job ends: what the best is in a longer job.
    lasting_best: Best | None = None
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
    # What was said of bad samples, in short, so that it is said once: `told_once`.
    told: tuple[str, ...] = ()
    # Where memory ran out: since which step lanes cut their samples into how many micro-batches.
    micro_batches: MicroBatchChanges = ()
    # Steps that the optimizers have left out, since their gradients were too large for float16.
    overflows: int = 0
    # What a training loop of one's own keeps in run.state, as JSON.
    kept: str = ""

    def after_step(self, samples: int, tally: Tally = NOTHING, *, bad: int = 0, is_barren: bool = False) -> "Progress":
        """One more step of so many samples, which these are, and so many bad ones."""
        # By hand: it is made at every step, and `replace` takes six times as long.
        after = object.__new__(Progress)
        vars(after).update(
            vars(self),
            cursor=Cursor(self.cursor.step + 1, Phase.TRAINED),
            samples=self.samples + samples,
            tally=self.tally + tally,
            bad=self.bad + bad,
            barren=self.barren + 1 if is_barren else 0,
            best=self.lasting_best,
        )
        return after

    def with_micro_batches(self, step: int, count: int) -> "Progress":
        """From this step on, so many micro-batches in each lane, at least."""
        return replace(self, micro_batches=tuple(sorted({*self.micro_batches, (step, count)})))

    def keeping(self, kept: str) -> "Progress":
        """With what a loop of one's own keeps from this step on."""
        return replace(self, kept=kept)

    def knowing(self, changes: MicroBatchChanges) -> "Progress":
        """With what the run has noted of steps that are still to come. Of those that are done this state knows itself;
        what else is noted of them was given up with the generation that had agreed on it."""
        coming = {change for change in changes if change[0] > self.cursor.step}
        return replace(self, micro_batches=tuple(sorted({*self.micro_batches, *coming}))) if coming else self

    def after_evaluation(
        self,
        metrics: dict[str, float],
        evaluate: EvaluateSpec,
        early_stop: EarlyStopSpec | None,
        bad: int = 0,
        *,
        has_effects: bool = True,
    ) -> "Progress":
        """An evaluation that left out so many samples, and what follows from it: best metric, patience, early stop.
        Without effects, the best as long as no step follows, and nothing else."""
        step = self.cursor.step
        best = self.best
        watched = evaluate.metric or ("loss" if "loss" in metrics else None)
        if watched is not None:
            best = _better(best, metric_of(metrics, watched, "evaluate.metric"), step, evaluate.mode)
        after = replace(self, cursor=self.cursor.evaluated(), metrics=metrics, best=best, bad_evaluated=bad)
        if not has_effects:
            return after
        after = replace(after, lasting_best=best)
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
        cursor = [self.cursor.step, int(self.cursor.phase)]
        return asdict(self) | {"cursor": cursor, "tally": str(self.tally), "told": list(self.told)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Progress":
        step, phase = fields["cursor"]
        told = {"lasting_best": fields["best"]} | fields  # an earlier version has one best only
        bests = {key: Best(**told[key]) if told[key] else None for key in ("best", "lasting_best", "patience_best")}
        return cls(
            **fields
            | {
                **bests,
                "cursor": Cursor(step, Phase(phase)),
                "tally": Tally.from_hex(fields["tally"]),
                "told": tuple(fields.get("told", ())),
                "micro_batches": tuple((step, count) for step, count in fields.get("micro_batches", ())),
            }
        )


@dataclass(frozen=True)
class Evaluated:
    """The metrics, and the samples that were left out as bad; `why` says of the first of these what is wrong. `notes`
    are what this worker has met with in reading, `put_back` the names of what metrics() has assigned anywhere."""

    metrics: dict[str, float]
    bad: tuple[int, ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()


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
        given = "loss alone, as for a task without metrics()" if given == "loss" else given
        raise MetricError(f"{key}: there is no metric '{name}'; metrics() gives {given}.{near}")
    return metrics[name]
