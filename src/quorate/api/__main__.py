"""``python -m quorate.api``: a launcher of a job under faults, which can be killed (chaos.py).

Apart from what others import: Python warns of a module that it runs and that is imported already.
"""

import pickle
import signal
import sys

from quorate.core.errors import QuorateError


def main() -> int:
    """Train what standard input holds; the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path, launcher = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    try:
        launcher.train()
    except QuorateError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
