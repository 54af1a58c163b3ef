"""The targets of this project."""

from collections.abc import Sequence

from quorate.bench.row import Row
from quorate.bench.target import Target, Value

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


def _all_reduce(system: str, peer: str, size: int, processes: int = 2) -> Value:
    return _ratio(peer, system=system, processes=processes, bytes=size)


def _scaling(workers: int, threads: int = 1) -> dict[str, object]:
    return {"system": "quorate", "processes": workers, "threads": threads}


_TWO_CORES = range(2, 3)
_MANY_CORES = range(16, 10**6)

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
        "step",
        "tiny MLP: µs over the hand-written step",
        _detail("overhead_us", system="quorate", case="tiny-mlp"),
        60.0,
        is_lowest=False,
    ),
    Target(
        "step",
        "CNN: % over the hand-written step",
        _detail("overhead_percent", system="quorate", case="cnn"),
        1.0,
        is_lowest=False,
    ),
    Target(
        "startup",
        "2 workers: ours ÷ plain Python",
        _over(_ratio("plain-python", system="quorate")),
        1.4,
        is_lowest=False,
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
)
"""In the order of docs/benchmarks.md, which has the same texts."""
