"""A checkpoint that is written at once, as one part."""

from collections.abc import Callable
from typing import Any

from quorate.checkpoint.listing import CheckpointInfo
from quorate.checkpoint.manifest import Manifest
from quorate.checkpoint.store import CheckpointStore
from quorate.checkpoint.tensor_file import TensorFile
from quorate.checkpoint.tree import encode


def save_whole(
    store: CheckpointStore,
    state: dict[str, Any],
    *,
    step: int,
    phase: int = 0,
    weights_digest: str = "",
    job: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
) -> CheckpointInfo:
    """When this returns it is on the disk, under its final name."""
    encoded = encode(state)
    content = TensorFile(encoded.tensors)
    manifest = Manifest(
        step, phase, "", (), encoded.skeleton, weights_digest, job or {}, environment or {}, metrics or {}
    )
    attempt = store.open(manifest.cursor, content.size)
    try:
        attempt.sweep()
        attempt.write(0, 1, content.chunks())
        return store.commit(attempt.name, manifest, check)
    finally:
        attempt.give_up()
