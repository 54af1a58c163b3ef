"""Which checkpoints may go."""

from collections.abc import Sequence

from quorate.core.cursor import Cursor


def surplus(saved: Sequence[Cursor], keep: int, best: int | None, newest_whole: Cursor | None) -> tuple[Cursor, ...]:
    """All but the last `keep`, those of the step `best`, and the newest that is known to be whole, oldest first.

    The last ones may all be damaged: without `newest_whole` retention would then delete the only way back. Where none
    is known to be whole, nothing goes.
    """
    if newest_whole is None:
        return ()
    in_order = sorted(saved)
    spared = {*in_order[max(0, len(in_order) - keep) :], newest_whole}
    return tuple(cursor for cursor in in_order if cursor not in spared and cursor.step != best)
