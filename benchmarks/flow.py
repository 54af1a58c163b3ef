"""How fast samples come, from the moments at which batches were there. Only the standard library: peers use it too."""

from collections.abc import Sequence

from benchmarks.blocks import Blocks

WARM_UP = 0.1
"""The part of the batches that does not count: the first ones wait for files that are opened, and processes started."""


def counted(batches: int) -> Blocks:
    """Which of so many batches count; there must be two at least."""
    warm_up = max(1, int(batches * WARM_UP))
    if batches <= warm_up:
        raise SystemExit(f"{batches} batches are too few to measure: give a larger --size")
    return Blocks(warm_up, batches - warm_up)


def batch_ms(moments: Sequence[float]) -> list[float]:
    """Milliseconds of a batch, from the seconds at which each was there."""
    return counted(len(moments)).ms(dict(enumerate(moments, 1)))


def samples_per_second(batch: int, ms: Sequence[float]) -> float:
    """Over all that counts: unlike a median, it has a share of all that happens only now and then."""
    return batch * 1000 * len(ms) / sum(ms)
