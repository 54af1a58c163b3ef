"""Which knob to turn where a run waits for data."""

from dataclasses import dataclass
from typing import Any, Self

from quorate.spec.job import JobSpec


@dataclass(frozen=True)
class ShardReading:
    """What a run tells of a training set in shards, as far as waiting for it depends on it.

    `window_bytes` are what a lane reads from at a time, `memory_bytes` what all lanes of a worker have for that.
    """

    is_remote: bool
    has_decode: bool
    is_columns: bool
    is_cached: bool
    window_bytes: int
    memory_bytes: int

    @classmethod
    def told(cls, data: Any) -> "ShardReading | None":
        """From what a run tells of its training set when it begins; None if that is anything else."""
        reading = data.get("reading") if isinstance(data, dict) else None
        if not isinstance(reading, dict):
            return None
        flags = [reading.get(name) is True for name in ("remote", "decode", "columns", "cache")]
        sizes = [size if type(size := reading.get(name)) is int else 0 for name in ("window_bytes", "memory_bytes")]
        return cls(*flags, *sizes)


@dataclass(frozen=True)
class Knobs:
    """What a job is set to where waiting for data depends on it, and on what it runs.

    `window` is that of a training set in blocks, None for others. `workers` and `cores` are of one machine, 0 where
    that is not known. `draws`: random numbers are drawn for samples, so that none is the same in the next epoch.
    """

    loader_workers: int
    loader_prefetch: int
    window: int | None = None
    shards: ShardReading | None = None
    lanes: int = 1
    threads: int = 1
    workers: int = 0
    cores: int = 0
    draws: bool = False

    @classmethod
    def of(cls, spec: JobSpec, data: Any, workers: int | None, cores: int, *, draws: bool = False) -> Self:
        """`data` is what a run tells about its training set when it begins, if that is in blocks."""
        window = data.get("window") if isinstance(data, dict) else None
        return cls(
            spec.loader_workers,
            spec.loader_prefetch,
            window if type(window) is int else None,
            ShardReading.told(data),
            spec.lanes,
            spec.threads,
            workers or 0,
            cores,
            draws,
        )

    @property
    def advice(self) -> str:
        """What to try, with the present values."""
        tries = [*self._of_loaders(), *self._of_cache(), *self._of_window()]
        if not tries:
            return "faster storage or more cores may help"
        *before, last = tries
        return f"{', '.join(before)} or {last} may help" if before else f"{last} may help"

    def _of_loaders(self) -> list[str]:
        if self.shards is not None and self.shards.is_columns:
            return []  # loaders are for the code of the task, and none of it runs for these
        if self._has_free_cores:
            tries = [f"more loader_workers (now {self.loader_workers})"]
        else:
            tries = [f"more cores (all {self.cores} are in use)"]
        return [*tries, f"a larger loader_prefetch (now {self.loader_prefetch})"] if self.loader_workers else tries

    @property
    def _has_free_cores(self) -> bool:
        return not self.workers or not self.cores or self.workers * (self.threads + self.loader_workers) < self.cores

    def _of_cache(self) -> list[str]:
        shards = self.shards
        has_decoded = shards is not None and shards.has_decode and not self.draws
        is_of_use = shards is not None and not shards.is_cached and (shards.is_remote or has_decoded)
        return ["cache= of quorate.Shards"] if is_of_use else []

    def _of_window(self) -> list[str]:
        if self.window is None or self.window == 1:
            return []
        if self.shards is None:
            return [f"a smaller window of the training set (now {self.window:,})"]
        lanes = -(-self.lanes // max(1, self.workers))
        is_too_large = lanes * self.shards.window_bytes > self.shards.memory_bytes
        return [f"a smaller window= of quorate.Shards (now {self.window:,})"] if is_too_large else []
