"""The GPU benchmark: the models of examples/models, by `quorate train` and by loops that were tuned by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import example_job
from benchmarks.row import Row, details_in_words
from benchmarks.script import LIMIT
from benchmarks.system import Needs, System, Turn

QUORATE = System("quorate", "benchmarks.own.gpu_speed", is_ours=True)
FREE = System("quorate-free", "benchmarks.own.gpu_speed", is_ours=True)
COMPILED = System("hand-compiled", "benchmarks.peers.gpu_loops")
CAPTURED = System("hand-captured", "benchmarks.peers.gpu_loops")
BY_HAND = System("lightning-by-hand", "benchmarks.peers.gpu_loops")
LIGHTNING = System("lightning", "benchmarks.peers.gpu_loops", needs=Needs(("pytorch-lightning", "torch")))
ACCELERATE = System("accelerate", "benchmarks.peers.gpu_loops", needs=Needs(("accelerate", "torch")))
GANG = System("quorate-ddp", "benchmarks.own.gpu_speed", is_ours=True)
PLAIN_DDP = System("hand-ddp", "benchmarks.peers.gpu_loops")
TUNED = (COMPILED, CAPTURED)
OURS = (QUORATE.name, FREE.name, GANG.name)
DEFAULTS = (BY_HAND, LIGHTNING, ACCELERATE)
SYSTEMS = (QUORATE, FREE, GANG, *TUNED, PLAIN_DDP, *DEFAULTS)

MODELS = {"resnet50": "ResNet-50", "resnet18": "ResNet-18", "vit_b16": "ViT-B/16", "bert_large": "BERT-Large"}
MODELS |= {
    "gpt2_1b": "1B transformer",
    "gpt2": "GPT-2",
    "cifar_resnet50": "CIFAR-10, ResNet-50",
    "cifar_resnet18": "CIFAR-10, ResNet-18",
}
RESNET, SAVING, SHARDED = MODELS["resnet50"], "ResNet-50, a checkpoint every 50 steps", "ResNet-50 from shards"
TRANSFORMERS = ("vit_b16", "bert_large", "gpt2")
DIGESTS = ("resnet18", "gpt2")
LANES = (2, 4, 8)
SMALL = " (small, on the CPU)"
KILLED = "ResNet-50, one of 2 workers killed"
SHRUNK = "ResNet-50, twice the batch that fits"
PLANNED = "1B transformer, fsdp, activation checkpointing"
EXCHANGE = "100 MB between 2 workers"
CIFAR_EPOCHS = {"cifar_resnet50": 10, "cifar_resnet18": 30}
GOAL = 93.0
"""Percent of CIFAR-10's test images, the time to which is told."""


@dataclass(frozen=True)
class Lengths:
    """How long everything is measured."""

    warm_up: int = 60
    steps: int = 240
    saving_steps: int = 400
    save_every: int = 50
    digest_steps: int = 96
    shrunk_steps: int = 12
    planned_steps: int = 20
    kills: int = 3
    images: int = 8192


SMOKE = Lengths(
    warm_up=2,
    steps=6,
    saving_steps=8,
    save_every=4,
    digest_steps=24,
    shrunk_steps=24,
    planned_steps=4,
    kills=1,
    images=256,
)


@dataclass(frozen=True)
class Gpu:
    """Which rows are measured, and where runs and compiled kernels are kept; `smoke`, small and on the CPU."""

    rows: Sequence[str]
    keep: Path
    smoke: bool = False
    loaders: int = 8
    lengths: Lengths = field(default_factory=Lengths)
    systems: Sequence[System] = SYSTEMS
    name: str = "gpu"
    headline: str = (
        "Models of examples/models on one GPU. A step in steady state, by the run's own events, at the defaults of "
        "`quorate train`; hand-compiled and hand-captured are loops that were tuned by hand, the latter with the whole "
        "step in a CUDA graph; lightning-by-hand is what Lightning and accelerate do at bf16, written out."
    )

    def turns(self) -> list[Turn]:
        """Every row that was asked for; what several of them need is measured once."""
        wanted, turns = {system.name for system in self.systems}, list[Turn]()
        for row in self.rows:
            turns += [turn for turn in ROWS[row](self) if turn not in turns and turn.system.name in wanted]
        return turns

    def label(self, row: Row) -> str:
        """The case."""
        return row.case

    def explained(self, rows: Sequence[Row]) -> list[Row]:
        """With what each is against the hand-tuned loops, against one lane, and against a job that saves nothing."""
        one_lane = next((row for row in rows if row.system == QUORATE.name and self._named(row) == RESNET), None)
        return [self._explained(row, rows, one_lane) if row.system in OURS else row for row in rows]

    def _explained(self, row: Row, rows: Sequence[Row], one_lane: Row | None) -> Row:
        details, case = {}, self._named(row)
        tuned, usual = (_fastest(rows, systems, row.case) for systems in (TUNED, DEFAULTS))
        if tuned:
            details["of_tuned_percent"] = 100 * tuned / row.ms
        if usual:
            details["of_defaults"] = usual / row.ms
        plain = _fastest(rows, (PLAIN_DDP,), row.case)
        if plain and row.system == GANG.name:
            details["of_plain_ddp_percent"] = 100 * plain / row.ms
        if one_lane is not None and (case in map(lanes_case, LANES) or row.system == GANG.name):
            details["of_one_lane_percent"] = 100 * one_lane.ms / row.ms
        if one_lane is not None and case == SAVING:
            # By the mean: what happens only now and then has no share in the median.
            details["slower_percent"] = 100 * (row.details["mean_ms"] / one_lane.details["mean_ms"] - 1)
        return row.with_details(**details)

    def _named(self, row: Row) -> str:
        """The case as the targets call it, which no rehearsal meets."""
        return row.case.removesuffix(SMALL)

    def remarks(self, row: Row) -> dict[str, str]:
        """What the targets are about."""
        return details_in_words(row, REMARKS)

    # --- the rows

    def resnet50(self) -> list[Turn]:
        """At defaults, against all loops."""
        return [self._speed(QUORATE, "resnet50"), *(self._loop(each, "resnet50") for each in (*TUNED, *DEFAULTS))]

    def lanes(self) -> list[Turn]:
        """The same batch in one lane, and in more of them."""
        more = [self._speed(QUORATE, "resnet50", lanes_case(lanes), lanes=lanes) for lanes in LANES]
        return [self._speed(QUORATE, "resnet50"), *more]

    def transformers(self) -> list[Turn]:
        """At defaults and without determinism, against the hand-tuned loops."""
        turns: list[Turn] = []
        for model in TRANSFORMERS:
            turns += [self._speed(QUORATE, model), self._speed(FREE, model, deterministic=False)]
            turns += [self._loop(system, model) for system in TUNED]
        return turns

    def gangs(self) -> list[Turn]:
        """A gang of one, against one lane of the ring and against DistributedDataParallel."""
        ours = [self._speed(QUORATE, "resnet50"), self._speed(GANG, "resnet50", strategy="ddp")]
        return [*ours, self._loop(PLAIN_DDP, "resnet50")]

    def planned(self) -> list[Turn]:
        """A model of a billion parameters, and the memory that `quorate plan` says it needs."""
        script = System(QUORATE.name, "benchmarks.own.gpu_planned", is_ours=True)
        keys = {"strategy": "fsdp", "memory": {"checkpoint_activations": True}, "steps": self.lengths.planned_steps}
        return [self._turn(script, "gpt2_1b", PLANNED, True, {}, **keys)]

    def digests(self) -> list[Turn]:
        """Everything that must not change a bit."""
        script = System(QUORATE.name, "benchmarks.own.gpu_digests", is_ours=True)
        order, steps = {"workers": [1, 2, 4], "servers": 2}, self.lengths.digest_steps
        return [self._turn(script, model, digests_case(model), True, order, lanes=4, steps=steps) for model in DIGESTS]

    def recovery(self) -> list[Turn]:
        """One of two workers that share the GPU is killed."""
        script = System(QUORATE.name, "benchmarks.own.gpu_recovery", is_ours=True)
        order = {"workers": 2, "kills": self.lengths.kills}
        return [self._turn(script, "resnet50", KILLED, True, order, lanes=2, steps=1_000_000)]

    def exchange(self) -> list[Turn]:
        """Gradients of two workers that share the GPU, and a kill while one reads the other's memory."""
        script = System(QUORATE.name, "benchmarks.own.device_exchange", is_ours=True)
        size, repeats = (2**20, 5) if self.smoke else (100 * 2**20, 50)
        case = EXCHANGE + (SMALL if self.smoke else "")
        order = {"case": case, "size": size, "repeats": repeats, "is_gpu": not self.smoke, "limit": LIMIT}
        return [Turn(script, case, order)]

    def busy(self) -> list[Turn]:
        """Raw samples from shards."""
        order = {"images": self.lengths.images, "is_watched": True}
        return [self._speed(QUORATE, "resnet50", SHARDED, order)]

    def checkpoint(self) -> list[Turn]:
        """With saves now and then, and without."""
        every = {"checkpoint": {"every": self.lengths.save_every, "keep": 1}}
        saving = self._speed(QUORATE, "resnet50", SAVING, steps=self.lengths.saving_steps, **every)
        return [self._speed(QUORATE, "resnet50"), saving]

    def memory(self) -> list[Turn]:
        """A batch of which half fits, with `on_out_of_memory: shrink`."""
        script = System(QUORATE.name, "benchmarks.own.gpu_memory", is_ours=True)
        # Not compiled: each batch that is tried would be compiled anew, which takes a minute.
        keys = {"task": "benchmarks.tight_task:TightResNet"} if self.smoke else {"compile": False}
        order = {"begin": 16 if self.smoke else 2048}
        return [self._turn(script, "resnet50", SHRUNK, True, order, steps=self.lengths.shrunk_steps, **keys)]

    def cifar(self) -> list[Turn]:
        """To the end, by accuracy."""
        script = System(QUORATE.name, "benchmarks.own.gpu_cifar", is_ours=True)
        order = {"goal_percent": GOAL, "needs_data": not self.smoke}
        length = {"steps": 4, "evaluate": {"every": 2, "batch_size": 16}} if self.smoke else {}
        return [
            self._turn(script, model, MODELS[model], True, order, **(length or {"epochs": epochs}))
            for model, epochs in CIFAR_EPOCHS.items()
        ]

    def _speed(
        self, system: System, model: str, case: str = "", order: dict[str, Any] | None = None, **keys: Any
    ) -> Turn:
        lengths = {"warm_up": self.lengths.warm_up, "steps": keys.pop("steps", self.lengths.steps)}
        total = sum(lengths.values())
        return self._turn(system, model, case or MODELS[model], False, lengths | (order or {}), steps=total, **keys)

    def _loop(self, system: System, model: str) -> Turn:
        order = {"loop": system.name, "warm_up": self.lengths.warm_up, "steps": self.lengths.steps}
        return self._turn(system, model, MODELS[model], False, order)

    def _turn(self, system: System, model: str, case: str, once: bool, order: dict[str, Any], **keys: Any) -> Turn:
        keys = {"workers": 1, "loader_workers": self.loaders, **keys}
        job, case = example_job(model, small=self.smoke, **keys), case + (SMALL if self.smoke else "")
        told = {"case": case, "job": job, "keep": str(self.keep.absolute()), **order}
        return Turn(system, case, told, once=once)


ROWS: dict[str, Callable[[Gpu], list[Turn]]] = {
    "resnet50": Gpu.resnet50,
    "lanes": Gpu.lanes,
    "transformers": Gpu.transformers,
    "gangs": Gpu.gangs,
    "planned": Gpu.planned,
    "digests": Gpu.digests,
    "recovery": Gpu.recovery,
    "exchange": Gpu.exchange,
    "busy": Gpu.busy,
    "checkpoint": Gpu.checkpoint,
    "memory": Gpu.memory,
    "cifar": Gpu.cifar,
}

REMARKS = {
    "samples_per_second": ("samples/s", 0, ""),
    "of_tuned_percent": ("of hand-tuned", 1, " %"),
    "of_defaults": ("of defaults", 2, "×"),
    "of_one_lane_percent": ("of one lane", 1, " %"),
    "of_plain_ddp_percent": ("of plain DDP", 1, " %"),
    "planned_gb": ("planned", 1, " GB"),
    "used_gb": ("used", 1, " GB"),
    "off_plan_percent": ("off the plan", 1, " %"),
    "slower_percent": ("slower", 1, " %"),
    "busy_percent": ("busy", 1, " %"),
    "digests": ("digests", 0, ""),
    "runs": ("runs", 0, ""),
    "redone": ("steps redone", 0, ""),
    "batch": ("batch", 0, ""),
    "micro_batches": ("micro-batches", 0, ""),
    "beyond_redo_ms": ("beyond the redone step", 0, " ms"),
    "of_staged": ("of pinned staging", 1, "×"),
    "lost_ms": ("lost", 1, " ms"),
    "back_ms": ("replaced", 0, " ms"),
    "first_step_s": ("first step", 1, " s"),
    "compile_s": ("compiling", 1, " s"),
    "best_percent": ("accuracy", 2, " %"),
    "seconds_to_goal": (f"to {GOAL:.0f} %", 0, " s"),
}
"""The details that people see: the name of the column, digits, unit."""


def digests_case(model: str) -> str:
    """GPT-2, 4 lanes: digests."""
    return f"{MODELS[model]}, 4 lanes: digests"


def lanes_case(lanes: int) -> str:
    """ResNet-50, 4 lanes."""
    return f"{RESNET}, {lanes} lanes"


def _fastest(rows: Sequence[Row], systems: Sequence[System], case: str) -> float | None:
    names = {system.name for system in systems}
    return min((row.ms for row in rows if row.system in names and row.case == case), default=None)
