"""A process that takes and frees the same memory over and over does not fault for it each time."""

import os
import resource

from quorate.core.machine import keep_freed_memory

ROUND, PIECE = 128, 150_000
ROUNDS = 5


def faults_in_a_child(*, keeps: bool) -> int:
    """Pages that are looked for while the last rounds take memory, fill it and free it; in hundreds at most 255."""
    child = os.fork()
    if child == 0:
        if keeps:
            keep_freed_memory(2**28)
        before = 0
        for number in range(ROUNDS + 1):
            if number == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            pieces = [bytearray(b"x") * PIECE for _ in range(ROUND)]
            del pieces
        os._exit(min(255, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 100))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_is_freed_is_kept_for_what_is_taken_next() -> None:
    pages = ROUNDS * ROUND * PIECE // os.sysconf("SC_PAGE_SIZE")
    assert faults_in_a_child(keeps=True) * 100 < pages / 10
