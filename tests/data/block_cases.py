"""Training sets in blocks of any sizes, and jobs that read them."""

from itertools import chain
from typing import Any

import numpy
from hypothesis import strategies as st

from data.jobs import job
from quorate.data.block_sampler import BlockSampler

Case = tuple[list[int], int, dict[str, Any]]


def stream(records: list[int], window: int, **keys: Any) -> BlockSampler:
    return BlockSampler(job(**keys), numpy.array(records, dtype=numpy.int64), window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Records of each block, some of them none; a window from 1 to more than there is; and the keys of a job."""
    lanes, accumulate = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    least = lanes * accumulate
    keys: dict[str, Any] = {
        "lanes": lanes,
        "accumulate": accumulate,
        "batch_size": draw(st.integers(least, least + 9)),
        "last_batch": draw(st.sampled_from(["drop", "keep"])),
        "epochs": 2,
        "seed": draw(st.integers(0, 2**40)),
    }
    records = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    fewest = keys["batch_size"] if keys["last_batch"] == "drop" else 1
    records[draw(st.integers(0, len(records) - 1))] += max(0, fewest - sum(records))
    return records, draw(st.integers(1, 15) | st.just(1000)), keys


def blocks_of_samples(records: list[int]) -> list[int]:
    return [block for block, count in enumerate(records) for _ in range(count)]


def read_by(order: BlockSampler, lane: int, epoch: int) -> list[int]:
    """What a lane reads in an epoch, in order."""
    first = epoch * order.steps_per_epoch + 1
    steps = range(first, first + order.steps_per_epoch)
    return list(chain.from_iterable(chain.from_iterable(order.micro_batches(step, lane) for step in steps)))


def blocks_of(order: BlockSampler, epoch: int, lane: int) -> Any:
    """The blocks that a lane reads from in an epoch, in order."""
    return order.position(epoch * order.steps_per_epoch + 1, lane).blocks
