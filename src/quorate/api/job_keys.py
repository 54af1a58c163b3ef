"""The keys of a job as Python's type checkers and editors see them."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

Section = Mapping[str, Any]


class JobKeys(TypedDict, total=False):
    """What `Job` takes besides its task: the keys of the job file, with the types that they have in Python."""

    version: Literal[1]
    name: str
    params: Section
    lanes: int
    threads: int
    batch_size: int
    epochs: int | None
    steps: int | None
    seed: int
    accumulate: int
    clip_norm: float | None
    schedule: Section | None
    average: Section | None
    last_batch: Literal["drop", "keep"]
    evaluate: Section
    early_stop: Section | None
    on_poison: Literal["fail", "skip"]
    on_bad_sample: Literal["fail", "skip"]
    deterministic: bool
    bucket_mb: float
    strategy: str | Section
    workers: int | Literal["auto"]
    min_workers: int
    spares: int
    failure_timeout: float
    step_timeout: float | None
    setup_timeout: float | None
    balance: Literal["even", "speed"]
    runs: str
    checkpoint: Section
    loader_workers: int
    loader_prefetch: int
    links: Literal["auto", "tcp"]
    overlap: bool
    port: int
    log_level: Literal["debug", "info", "warning", "error"]
