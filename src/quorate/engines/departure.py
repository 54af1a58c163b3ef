"""How a process that is gone has ended, in words."""

import signal


def describe_departure(code: int) -> str:
    """What an exit code, negative for a signal, says: "was killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
