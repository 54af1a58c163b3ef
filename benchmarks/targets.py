"""The targets of this project."""

from collections.abc import Sequence

from benchmarks.changes import SIGTERM
from benchmarks.compress import BYTES, LEARNT, NO_FEEDBACK, TOP_K
from benchmarks.gpu import (
    DIGESTS,
    EXCHANGE,
    FREE,
    GANG,
    KILLED,
    MODELS,
    PLANNED,
    QUORATE,
    RESNET,
    SAVING,
    SHARDED,
    SHRUNK,
    TRANSFORMERS,
    digests_case,
    lanes_case,
)
from benchmarks.on_ray import FIRST_STEP, JOINED, LOST, METRICS, RAY, TRACKED, crowd_case
from benchmarks.row import Row
from benchmarks.saves import ADDED, COMMITTED, LOADED, LOADED_AGAIN
from benchmarks.servers import SLOWED, TABLE
from benchmarks.target import Target, Value
from benchmarks.tune import ASHA, FASHION, LONG, PBT, TUNE, many_case

MB = 2**20


def _found(rows: Sequence[Row], **fields: object) -> Row | None:
    return next((row for row in rows if all(getattr(row, name) == value for name, value in fields.items())), None)


def _ratio(peer: str, **fields: object) -> Value:
    def value(rows: Sequence[Row]) -> float | None:
        row = _found(rows, **fields)
        return None if row is None else row.ratio_to.get(peer)

    return value


def _detail(name: str, **fields: object) -> Value:
    def value(rows: Sequence[Row]) -> float | None:
        row = _found(rows, **fields)
        return None if row is None else row.details.get(name)

    return value


def _over(less: Value) -> Value:
    """Our time divided by theirs, from theirs divided by ours."""

    def value(rows: Sequence[Row]) -> float | None:
        ratio = less(rows)
        return None if not ratio else 1 / ratio

    return value


def _times(row_fields: dict[str, object], base_fields: dict[str, object]) -> Value:
    def value(rows: Sequence[Row]) -> float | None:
        row, base = _found(rows, **row_fields), _found(rows, **base_fields)
        return None if row is None or base is None else row.ms / base.ms

    return value


def _worst(name: str, prefix: str = "") -> Value:
    """The largest of a detail, over all cases that begin like this."""

    def value(rows: Sequence[Row]) -> float | None:
        found = [row.details[name] for row in rows if row.case.startswith(prefix) and name in row.details]
        return max(found, default=None)

    return value


def _saving(name: str, case: str) -> Value:
    return _detail(name, system="quorate", case=case, bytes=500 * MB)


def _feeding(name: str, case: str, system: str = "quorate") -> Value:
    return _detail(name, system=system, case=case)


def _all_reduce(system: str, peer: str, size: int, processes: int = 2) -> Value:
    return _ratio(peer, system=system, processes=processes, bytes=size)


def _scaling(workers: int, threads: int = 1) -> dict[str, object]:
    return {"system": "quorate", "processes": workers, "threads": threads}


_TWO_CORES = range(2, 3)
_MANY_CORES = range(16, 10**6)
_IDLE_CORE = range(2, 10**6)
"""One trains, the other is left for what happens meanwhile."""

TARGETS = (
    Target("allreduce", "shm, 2 processes, 1 KB: gloo ÷ ours", _all_reduce("quorate-shm", "gloo", 1024), 5.0),
    Target("allreduce", "shm, 2 processes, 1 MB: gloo ÷ ours", _all_reduce("quorate-shm", "gloo", MB), 4.0),
    Target("allreduce", "shm, 2 processes, 25 MB: gloo ÷ ours", _all_reduce("quorate-shm", "gloo", 25 * MB), 4.0),
    Target("allreduce", "shm, 2 processes, 100 MB: gloo ÷ ours", _all_reduce("quorate-shm", "gloo", 100 * MB), 3.5),
    Target("allreduce", "shm, 2 processes, 25 MB: openmpi ÷ ours", _all_reduce("quorate-shm", "openmpi", 25 * MB), 1.5),
    Target(
        "allreduce", "shm, 2 processes, 100 MB: openmpi ÷ ours", _all_reduce("quorate-shm", "openmpi", 100 * MB), 1.5
    ),
    Target(
        "allreduce",
        "shm, 4 processes on 2 cores, 25 MB: gloo ÷ ours",
        _all_reduce("quorate-shm", "gloo", 25 * MB, processes=4),
        3.0,
        cores=_TWO_CORES,
    ),
    Target("allreduce", "tcp, 2 processes, 25 MB: gloo ÷ ours", _all_reduce("quorate-tcp", "gloo", 25 * MB), 1.0),
    Target(
        "links",
        "25 MB at 1 Gbit/s: % slower when encrypted",
        _detail("slower_percent", system="tls", case="25 MB at 1000 Mbit/s"),
        10.0,
        is_lowest=False,
    ),
    Target(
        "servers",
        "shm, push and pull of 25 MB: grpc ÷ ours",
        _ratio("grpc", system="quorate-shm", bytes=25 * MB),
        4.0,
    ),
    Target(
        "servers",
        "shm, push and pull of 25 MB: the ring's all-reduce ÷ ours",
        _detail("of_ring", system="quorate-shm", bytes=25 * MB),
        0.6,
    ),
    *(
        Target(
            "servers",
            f"one of 4 workers slowed 4×: synchronous ÷ {mode}",
            _detail("faster", system=f"quorate-{mode}", case=SLOWED),
            2.0,
        )
        for mode in ("asynchronous", "bounded")
    ),
    Target(
        "servers",
        "a worker, a server or the coordinator killed: ms of the longest pause",
        _worst("worst_ms", "killed"),
        1000.0,
        is_lowest=False,
    ),
    *(
        Target(
            "servers",
            f"1 % of a table touched, TCP: {text} of dense ÷ sparse",
            _detail(name, system="quorate-sparse", case=TABLE),
            20.0,
        )
        for text, name in (("bytes", "fewer_bytes"), ("step time", "faster"))
    ),
    Target(
        "step",
        "tiny MLP: µs over the best hand-written step",
        _detail("overhead_us", system="quorate", case="tiny-mlp"),
        60.0,
        is_lowest=False,
    ),
    Target(
        "step",
        "tiny MLP: µs of a training loop of one's own over the same as a task",
        _detail("over_task_us", system="quorate-own-loop", case="tiny-mlp"),
        20.0,
        is_lowest=False,
    ),
    Target(
        "step",
        "CNN: % over the best hand-written step",
        _detail("overhead_percent", system="quorate", case="cnn"),
        1.0,
        is_lowest=False,
    ),
    Target(
        "tracking",
        "tiny MLP: µs more with all sinks on",
        _detail("cost_us", system="tracked", case="tiny-mlp"),
        100.0,
        is_lowest=False,
        cores=_IDLE_CORE,
    ),
    Target(
        "tracking",
        "CNN: % more with all sinks on",
        _detail("cost_percent", system="tracked", case="cnn"),
        1.0,
        is_lowest=False,
        cores=_IDLE_CORE,
    ),
    *(
        Target(
            "audits", f"CNN, {name}", _detail("cost_percent", system=system, processes=processes), most, is_lowest=False
        )
        for name, system, processes, most in (
            ("1 worker: % more with audits", "audited", 1, 0.6),
            ("2 workers: % more with audits", "audited", 2, 1.1),
            ("1 worker: % more with recorded lanes", "recorded", 1, 1.0),
        )
    ),
    Target("looking", "a long run: s until the slowest command has shown it", _worst("seconds"), 2.0, is_lowest=False),
    Target("looking", "a long run: MB of the largest command", _worst("peak_mb"), 300.0, is_lowest=False),
    Target(
        "startup",
        "2 workers: ours ÷ plain Python",
        _over(_ratio("plain-python", system="quorate")),
        1.4,
        is_lowest=False,
    ),
    Target(
        "startup",
        "a run after another: ms beside its 20 steps",
        _detail("beyond_ms", system="quorate-warm"),
        600.0,
        is_lowest=False,
    ),
    *(
        Target("startup", f"{what}: ms", _detail("command_ms", system=system), 300.0, is_lowest=False)
        for what, system in (("quorate --help", "quorate-help"), ("import quorate", "quorate-import"))
    ),
    *(
        Target(
            "recovery",
            f"{workers} workers: ms from the kill to the next step, beyond the redone one",
            _detail("beyond_redo_ms", system="quorate", processes=workers),
            250.0,
            is_lowest=False,
        )
        for workers in (2, 3, 4)
    ),
    Target(
        "recovery",
        "2 workers: ms from the kill to the replacement",
        _detail("back_ms", system="quorate", processes=2),
        1000.0,
        is_lowest=False,
    ),
    Target(
        "recovery",
        "3 workers: % of the time with progress, a kill every 30 s",
        _detail("available_percent", system="quorate", processes=3),
        99.0,
    ),
    Target(
        "ddp",
        "a step of the CNN: % slower than DistributedDataParallel",
        _detail("slower_percent", system="quorate", processes=2),
        1.0,
        is_lowest=False,
    ),
    Target(
        "ddp",
        "ms from the kill to the next step of the gang",
        lambda rows: next((row.ms for row in rows if row.system == "quorate-ddp"), None),
        3000.0,
        is_lowest=False,
    ),
    Target(
        "ddp",
        "completed steps that are trained again after kills",
        _detail("steps_lost", system="quorate-ddp"),
        0.0,
        is_lowest=False,
    ),
    Target(
        "scaling",
        "4 × 2 threads on 2 cores: time ÷ that of 2 workers",
        _times(_scaling(4, 2), _scaling(2)),
        1.3,
        is_lowest=False,
        cores=_TWO_CORES,
    ),
    Target(
        "scaling",
        "4 workers on 16 cores: efficiency in %",
        _detail("efficiency_percent", **_scaling(4)),
        95.0,
        cores=_MANY_CORES,
    ),
    Target(
        "scaling",
        "8 workers on 16 cores: efficiency in %",
        _detail("efficiency_percent", **_scaling(8)),
        90.0,
        cores=_MANY_CORES,
    ),
    Target(
        "scaling",
        "8 workers on 16 cores: % of the ceiling",
        _detail("ceiling_percent", **_scaling(8)),
        97.0,
        cores=_MANY_CORES,
    ),
    Target(
        "overlap",
        "200 Mbit/s: step ÷ (forward + the longer of backward and exchange + apply)",
        _detail("of_ideal", system="quorate", case="200 Mbit/s"),
        1.15,
        is_lowest=False,
    ),
    Target(
        "compress",
        "Top-K 1 %: bytes of a dense gradient ÷ bytes that a lane sends",
        _detail(BYTES, system=TOP_K.name, case=LEARNT),
        40.0,
    ),
    Target(
        "compress",
        "Top-K 1 % on digits: points of accuracy below whole gradients",
        _detail("lost_points", system=TOP_K.name, case=LEARNT),
        0.5,
        is_lowest=False,
    ),
    Target(
        "compress",
        "Top-K 1 % on digits without feedback: points of accuracy below whole gradients",
        _detail("lost_points", system=NO_FEEDBACK.name, case=LEARNT),
        0.5,
    ),
    Target(
        "compress",
        "100 Mbit/s, 2 workers: step with whole gradients ÷ with Top-K 1 %",
        _detail("faster", system=TOP_K.name, case="100 Mbit/s"),
        5.0,
    ),
    Target(
        "changes",
        "resize 2→4→1→3: ms of the longest pause beyond a usual step",
        _worst("worst_ms", "resize"),
        100.0,
        is_lowest=False,
    ),
    Target(
        "changes",
        "SIGTERM to each worker: ms of the longest pause beyond a usual step",
        _worst("worst_ms", SIGTERM),
        100.0,
        is_lowest=False,
    ),
    Target("changes", "workers that were taken for lost", _worst("lost_workers"), 0.0, is_lowest=False),
    Target(
        "sharded",
        "1 GB, 2 workers with fsdp: ms that training waits for a save (or no longer than DCP's asynchronous stager)",
        lambda rows: next((row.ms for row in rows if row.system == "quorate-fsdp"), None),
        20.0,
        is_lowest=False,
    ),
    Target(
        "sharded",
        "1 GB, 2 workers with fsdp: % of the bytes that one of them writes",
        _detail("largest_share_percent", system="quorate-fsdp"),
        51.0,
        is_lowest=False,
    ),
    *(
        Target("checkpoint", f"500 MB: {text}", value, limit, is_lowest=False, cores=_IDLE_CORE)
        for text, value, limit in (
            ("ms that training waits for a save", _saving("waited_ms", ADDED), 10.0),
            ("steps during a save ÷ undisturbed ones", _saving("step_ratio", ADDED), 1.05),
            ("until committed ÷ raw write and fsync", _saving("of_raw", COMMITTED), 1.25),
            ("load and verify from the disk ÷ raw read", _saving("of_raw", LOADED), 1.5),
            ("load and verify from the page cache ÷ raw read", _saving("of_raw", LOADED_AGAIN), 1.5),
            ("extra memory ÷ state, 5 % being for buffers", _saving("memory_of_state", ADDED), 1.05),
        )
    ),
    *(
        target
        for kind, name in (("parquet", "Parquet"), ("tar", "tar"))
        for target in (
            Target("data", f"{name}: % of the raw decode rate", _feeding("of_raw_percent", kind), 90.0),
            Target(
                "data", f"{name}: MB of memory above the model", _feeding("memory_mb", kind), 300.0, is_lowest=False
            ),
            Target(
                "data",
                f"{name}: MB that memory grows from the first third to the last",
                _feeding("growth_mb", kind),
                30.0,
                is_lowest=False,
            ),
            Target(
                "data",
                f"{name} from a store with 50 ms: % of the rate from a folder",
                _feeding("of_folder_percent", f"{kind} from a store", "quorate-store"),
                90.0,
                cores=_IDLE_CORE,
            ),
        )
    ),
    *(
        Target(
            "data",
            f"{name}: % of a step that is waiting for data",
            _feeding("waiting_percent", case),
            1.0,
            is_lowest=False,
        )
        for case, name in (("digits", "digits"), ("fashion-mnist", "Fashion-MNIST"))
    ),
    *(
        Target("gpu", text, _detail(detail, system=QUORATE.name, case=case), limit, is_lowest=is_lowest)
        for text, detail, case, limit, is_lowest in (
            ("ResNet-50: % of the better hand-tuned loop", "of_tuned_percent", RESNET, 100.0, True),
            ("ResNet-50: times as fast as Lightning and accelerate", "of_defaults", RESNET, 2.7, True),
            ("ResNet-50, 2 lanes: % of one lane", "of_one_lane_percent", lanes_case(2), 90.0, True),
            ("ResNet-50, 4 lanes: % of one lane", "of_one_lane_percent", lanes_case(4), 77.0, True),
            ("ResNet-50, 8 lanes: % of one lane", "of_one_lane_percent", lanes_case(8), 60.0, True),
        )
    ),
    *(
        Target(
            "gpu",
            f"{MODELS[model]}{how}: % of the better hand-tuned loop",
            _detail("of_tuned_percent", system=system.name, case=MODELS[model]),
            limit,
        )
        for system, how, limit in ((QUORATE, "", 85.0), (FREE, ", `deterministic: false`", 98.0))
        for model in TRANSFORMERS
    ),
    *(
        Target("gpu", f"ResNet-50, `strategy: ddp`: % of {what}", _detail(detail, system=GANG.name, case=RESNET), limit)
        for what, detail, limit in (
            ("one lane of the ring", "of_one_lane_percent", 95.0),
            ("plain compiled DDP", "of_plain_ddp_percent", 99.0),
        )
    ),
    *(
        Target(
            "gpu",
            f"{MODELS[model]}, 4 lanes: different digests of all runs",
            _detail("digests", system=QUORATE.name, case=digests_case(model)),
            1.0,
            is_lowest=False,
        )
        for model in DIGESTS
    ),
    *(
        Target("gpu", text, _detail(detail, system=QUORATE.name, case=case), limit, is_lowest=is_lowest)
        for text, detail, case, limit, is_lowest in (
            (
                "one of 2 workers of a GPU killed: ms to the next step, beyond the redone one",
                "beyond_redo_ms",
                KILLED,
                1000.0,
                False,
            ),
            ("100 MB between 2 workers of a GPU: times as fast as pinned staging", "of_staged", EXCHANGE, 20.0, True),
            ("ResNet-50 from shards: % of the time that the GPU is busy", "busy_percent", SHARDED, 95.0, True),
            ("ResNet-50, a checkpoint every 50 steps: % slower", "slower_percent", SAVING, 1.0, False),
            ("twice the batch that fits: times that a step is done again", "redone", SHRUNK, 3.0, False),
            ("twice the batch that fits: different digests, killed and resumed", "digests", SHRUNK, 1.0, False),
            ("1B transformer, fsdp: % that its memory is off the plan", "off_plan_percent", PLANNED, 10.0, False),
            ("CIFAR-10, ResNet-50, 10 epochs: % right", "best_percent", MODELS["cifar_resnet50"], 90.0, True),
            ("CIFAR-10, ResNet-18, 30 epochs: % right", "best_percent", MODELS["cifar_resnet18"], 93.0, True),
        )
    ),
    *(
        Target("ray", text, _detail(detail, system=system.name, case=case), limit, is_lowest=False)
        for text, detail, system, case, limit in (
            ("command to first step: times of a local job's", "of_local", RAY, FIRST_STEP, 2.0),
            ("one of 3 nodes killed: ms to the next step", "next_step_ms", RAY, LOST, 2000.0),
            ("another node added: ms until it is used", "used_ms", RAY, JOINED, 10_000.0),
            ("64 workers on 4 nodes: ms until they are formed", "formed_ms", RAY, crowd_case(64), 30_000.0),
            ("64 workers on 4 nodes: MB of launcher and coordinator", "together_mb", RAY, crowd_case(64), 300.0),
            ("metrics of every step: % slower", "slower_percent", TRACKED, METRICS, 1.0),
        )
    ),
    *(
        Target("tune", text, _detail(detail, system=TUNE.name, case=case), limit, is_lowest=detail == "not_worse")
        for text, detail, case, limit in (
            ("10 trials of 30 s, 2 at a time: times of training ÷ 2", "of_training", LONG, 1.05),
            ("200 tiny trials, 10 at a time: ms each beyond training", "beyond_ms", many_case(200, 10), 1000.0),
            ("200 tiny trials: MB that the driver grows after 50", "growth_mb", many_case(200, 10), 100.0),
            ("asha on digits: % of the steps", "steps_percent", ASHA, 50.0),
            ("asha on digits: points of accuracy lost", "points_lost", ASHA, 1.0),
            ("asha on Fashion-MNIST: % of the steps", "steps_percent", FASHION, 50.0),
            ("asha on Fashion-MNIST: points of accuracy lost", "points_lost", FASHION, 1.0),
            ("pbt on digits: seeds of 5 in which it is not worse than random", "not_worse", PBT, 4.0),
        )
    ),
)
"""In the order of docs/reference/benchmarks.md, which has the same texts."""
