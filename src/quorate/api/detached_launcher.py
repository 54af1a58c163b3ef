"""``python -m quorate.api.detached_launcher FOLDER``: the launcher of a detached run, started by Ray."""

import signal
import sys
from pathlib import Path

from quorate.api.detached import launch
from quorate.api.train import show_on_stderr
from quorate.core.errors import QuorateError


def main() -> int:
    """Train the run in that folder; the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return launch(Path(sys.argv[1]), show_on_stderr).exit_code
    except QuorateError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
