"""Threads that help with reading: they run nothing of the task, and no signal ends up in them."""

import signal
import threading
from collections.abc import Callable


def start_helper(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that ends with the process, if not before."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    # Signals are for the main thread, whose waiting they must interrupt; a thread inherits what is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread
