"""A spawned worker's process: ``python -m quorate.worker PARENT``, told its assignment by a line on standard input."""

import os
import signal
import sys

from quorate.core.addresses import enter_network
from quorate.core.processes import die_with_parent
from quorate.core.user_code import refuse_breakpoints
from quorate.worker.assignment import Assignment


def main() -> int:
    """Be a worker; the exit code."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assignment = Assignment.from_json(sys.stdin.readline())
    if assignment.network.namespace:
        enter_network(assignment.network.namespace)
    refuse_breakpoints()
    # Only now: importing torch takes seconds, in which the parent may die.
    from quorate.replica.device import CPU
    from quorate.task.source import load_task_type
    from quorate.worker.process import Worker, start_log

    start_log(assignment)
    CPU.pin(1, assignment.job["deterministic"])
    worker = Worker(assignment, load_task_type(assignment.task, assignment.job["seed"]))
    worker.leave_when_terminated()
    return worker.live()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would take torch apart, module by module, for a second or two, while the launcher waits.
    os._exit(code)
