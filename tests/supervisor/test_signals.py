import signal
import threading

import pytest

from quorate.core.processes import describe_departure
from quorate.supervisor.signals import Signals, listening_to_signals


@pytest.mark.parametrize(
    ("number", "reason", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_the_first_signal_is_a_request_and_the_second_an_order(number: signal.Signals, reason: str, code: int) -> None:
    before = signal.getsignal(number)
    with listening_to_signals() as signals:
        assert (signals.reason, signals.at_once) == (None, False)
        signal.raise_signal(number)
        assert (signals.reason, signals.at_once, signals.exit_code) == (reason, False, code)
        signal.raise_signal(number)
        assert signals.at_once
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("other", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_is_a_request_as_sigterm_is_and_never_hurries(other: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGHUP)
    with listening_to_signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert (signals.reason, signals.at_once, signals.exit_code) == ("terminated", False, 143)
        signal.raise_signal(other)
        assert not signals.at_once
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with listening_to_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_that_the_program_handles_itself_is_left_to_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with listening_to_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert (signals.received, heard) == ([], [signal.SIGHUP])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_gives_way_to_jobs_does_so_for_a_hangup_too() -> None:
    from quorate.cli.main import _Stop

    before = signal.signal(signal.SIGHUP, _Stop())
    try:
        with listening_to_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_who_listen_hear_the_same() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)]
    with listening_to_signals() as outer:
        with listening_to_signals() as inner:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        assert inner.received == outer.received == [signal.SIGHUP, signal.SIGINT]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)] == before


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
    ("code", "words"), [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-60, "was killed by signal 60")]
)
def test_departures_in_words(code: int, words: str) -> None:
    assert describe_departure(code) == words
