"""The process of the trials in one place of a search on this machine: a launcher that trains one after another."""

import os
import signal
import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection

from quorate.api.warm import WarmRunner
from quorate.core.processes import die_with_parent, show_as
from quorate.tune.trial_run import Plan, TrialRun


def main() -> None:
    """Take plans from the search, and tell it what they come to. SIGINT ends the trial that is under way."""
    die_with_parent(int(sys.argv[1]))
    descriptor = int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as search, WarmRunner() as runner, closing(TrialRun(runner)) as run:
        signal.signal(signal.SIGINT, lambda *_: run.ask_to_stop())
        with suppress(EOFError, OSError):  # the search has ended
            while True:
                plan: Plan = search.recv()
                show_as("trials", plan.trials.parent.name)
                run.begin(plan)
                is_over = False
                while not is_over:
                    report = run.next()
                    search.send(report)
                    is_over = bool(report.ending)


if __name__ == "__main__":
    main()
