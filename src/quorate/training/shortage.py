"""Memory that ran out: in how many micro-batches a step is done again, and what is told of it."""

from quorate.core.errors import JobError
from quorate.observe.events import MemoryRanOut
from quorate.spec.job import JobSpec
from quorate.training.hints import what_needs_less_memory
from quorate.training.strategy import Shortage


def more_micro_batches(spec: JobSpec, step: int, shortage: Shortage) -> int:
    """Twice as many as were tried, or what others knew already. Raises where each has one sample."""
    if not shortage.lanes:
        return shortage.tried
    samples = -(-spec.batch_size // spec.lanes)
    if shortage.tried >= samples:
        raise JobError(
            f"Memory ran out in lane {shortage.lanes[0]} at step {step} with one sample at a time, so there is no "
            f"smaller micro-batch ({shortage.why}). {what_needs_less_memory(spec)}"
        )
    return min(2 * shortage.tried, samples)


def memory_ran_out(spec: JobSpec, step: int, micro_batches: int, shortage: Shortage | None) -> MemoryRanOut:
    """Of a step that is done, however often it was tried: there is one number that it was done with."""
    return MemoryRanOut(
        step=step,
        lanes=() if shortage is None else shortage.lanes,
        micro_batches=micro_batches,
        samples=-(-spec.batch_size // (spec.lanes * micro_batches)),
        reason=None if shortage is None else shortage.why or None,
    )
