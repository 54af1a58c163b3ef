import signal

import pytest

from quorate.api.train import pass_on_signal, passing_on_signals
from quorate.core.failure import Failure, JobFailed
from quorate.supervisor.signals import listening_to_signals


def test_ctrl_c_raises_what_it_always_raises() -> None:
    with pytest.raises(KeyboardInterrupt, match="run x was interrupted"):
        pass_on_signal(130, "run x was interrupted")


@pytest.mark.parametrize("code", [143, 129])
def test_other_signals_end_the_script_with_their_code(code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        pass_on_signal(code, "run x was terminated")
    assert ended.value.code == code


@pytest.mark.parametrize("code", [0, 1, 2])
def test_without_a_signal_nothing_happens(code: int) -> None:
    pass_on_signal(code, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_program_is_called_instead(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda received, _: heard.append(received))
    try:
        pass_on_signal(128 + number, "")
    finally:
        signal.signal(number, before)
    assert heard == [number]


def test_a_job_that_was_stopped_at_once_is_an_interruption_and_one_that_failed_is_a_failure() -> None:
    with pytest.raises(KeyboardInterrupt, match="stopped at once"), passing_on_signals():
        raise JobFailed(Failure("Interrupted", "stopped at once", exit_code=130))
    with pytest.raises(JobFailed, match="worker 1 was killed"), passing_on_signals():
        raise JobFailed(Failure("WorkerLost", "worker 1 was killed"))


def test_a_hangup_is_not_passed_on_as_the_sigterm_that_it_counts_as() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit) as ended, passing_on_signals(), listening_to_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            raise JobFailed(signals.failure("terminated; the run is as it was."))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ended.value.code, heard) == (143, [])


def test_before_and_after_a_job_a_signal_does_what_it_always_does() -> None:
    """What is done there may take long, such as to read a checkpoint through."""
    with passing_on_signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with listening_to_signals():
            signal.raise_signal(signal.SIGINT)
        assert signals.received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
