"""Run every fault test again and again on a busy machine, and stop at the first failure: `make test-faults N=20`."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

BUSY = 2
PATIENCE = 60.0
# It looks whether its parent is there: also one that is killed leaves no load behind.
LOAD = """
import os
import sys

while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def under_load(processes: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile, on whatever core."""
    busy = []
    try:
        for _ in range(processes):
            busy.append(subprocess.Popen([sys.executable, "-c", LOAD, str(os.getpid())]))
        yield
        gone = [process.pid for process in busy if process.poll() is not None]
        if gone:
            sys.exit(f"the load has ended before the tests (pids {gone}): nothing is shown. Run it again.")
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def play(arguments: list[str]) -> int:
    """One round; the exit code of pytest, which cleans up after its tests however it is ended."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "faults and not long",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    tests = subprocess.Popen(command)
    try:
        return tests.wait()
    except BaseException:
        tests.send_signal(signal.SIGINT)
        try:
            tests.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            tests.kill()
            tests.wait()
        raise


def main() -> int:
    """Play the rounds; the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments go to pytest.")
    parser.add_argument("--rounds", type=int, default=20, help="how often (20)")
    parser.add_argument("--busy", type=int, default=BUSY, help=f"how many busy processes beside them ({BUSY})")
    options, arguments = parser.parse_known_args()
    if options.rounds < 1 or options.busy < 0:
        parser.error("--rounds is a number from 1 on, and --busy one from 0 on")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    with under_load(options.busy):
        for number in range(1, options.rounds + 1):
            print(f"round {number} of {options.rounds}", flush=True)
            code = play(arguments)
            if code:
                print(f"failed in round {number} of {options.rounds}", flush=True)
                return code
    print(f"{options.rounds} rounds passed in {(time.monotonic() - began) / 60:.0f} min", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
