import os
import signal
import threading

import pytest

from quorate.engines.departure import describe_departure
from quorate.engines.signals import Signals, listening_to_signals


@pytest.mark.parametrize(
    ("number", "reason", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_the_first_signal_is_a_request_and_the_second_an_order(number: signal.Signals, reason: str, code: int) -> None:
    before = signal.getsignal(number)
    with listening_to_signals() as signals:
        assert (signals.reason, signals.at_once) == (None, False)
        os.kill(os.getpid(), number)
        assert (signals.reason, signals.at_once, signals.exit_code) == (reason, False, code)
        os.kill(os.getpid(), number)
        assert signals.at_once
    assert signal.getsignal(number) is before


def test_a_thread_leaves_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    heard: list[tuple[Signals, object]] = []

    def listen() -> None:
        with listening_to_signals() as signals:
            heard.append((signals, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == [(Signals(), before)]


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-60, "was killed by signal 60")],
)
def test_departures_in_words(code: int, words: str) -> None:
    assert describe_departure(code) == words
