import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorate.core.errors import LossError, RequestError, TaskError, UserCodeError
from quorate.core.failure import Failure, JobFailed, Remains
from quorate.core.generation import server_id

numbers = st.none() | st.integers(0, 2**40)


@given(
    st.builds(
        Failure,
        kind=st.text(),
        message=st.text(),
        worker=numbers,
        lane=numbers,
        step=numbers,
        phase=st.text(),
        traceback=st.text(),
        exit_code=st.integers(0, 255),
        peer=numbers,
    )
)
def test_a_failure_survives_json(failure: Failure) -> None:
    assert Failure.from_dict(json.loads(json.dumps(failure.to_dict()))) == failure


def test_a_failure_of_user_code_keeps_the_users_traceback() -> None:
    failure = Failure.of(UserCodeError("KeyError: 'x' (in loss())", "Traceback: the user's line"))
    assert (failure.kind, failure.exit_code) == ("UserCodeError", 1)
    assert failure.traceback == "Traceback: the user's line"


@pytest.mark.parametrize(
    ("error", "exit_code"), [(TaskError("no class"), 2), (LossError("nan"), 1), (ValueError("odd"), 1)]
)
def test_a_failure_has_the_kind_the_text_and_the_exit_code_of_its_error(error: Exception, exit_code: int) -> None:
    failure = Failure.of(error)
    assert failure == Failure(type(error).__name__, str(error), exit_code=exit_code)


@pytest.mark.parametrize("place", [{"worker": 1, "lane": 3, "step": 7, "phase": "compute"}, {"step": 2}])
def test_the_place_is_filled_in_without_changing_the_rest(place: dict[str, Any]) -> None:
    failure = Failure.of(LossError("the loss is nan"))
    assert failure.at(**place).to_dict() == failure.to_dict() | place


def test_the_launcher_raises_a_request_error_for_a_wrong_request() -> None:
    error = Failure.of(TaskError("there is no class Digits")).error()
    assert isinstance(error, RequestError)
    assert str(error) == "there is no class Digits"


def test_an_exception_of_the_task_is_no_mere_refusal_although_its_exit_code_is_two() -> None:
    """Its run is kept: the logs hold what the task has printed."""
    failure = Failure.of(UserCodeError("KeyError: 'x' (in model())", "Traceback: line 3", 2))
    assert (failure.exit_code, failure.is_refusal) == (2, False)
    assert isinstance(failure.error(), JobFailed)
    assert Failure.of(TaskError("no class")).is_refusal
    assert not Failure.of(LossError("nan")).is_refusal


def test_a_failed_job_knows_its_run() -> None:
    assert JobFailed(Failure("LossError", "nan")).run == ""
    remains = Remains("tiny-0001", "/runs/tiny-0001", "runs/tiny-0001/logs", "quorate resume tiny-0001", "resume it")
    assert JobFailed(Failure("LossError", "nan"), remains).run == "tiny-0001"


def test_the_launcher_raises_job_failed_with_message_and_traceback() -> None:
    failure = Failure.of(UserCodeError("KeyError: 'x' (in loss())", "Traceback: line 3"))
    error = failure.error()
    assert isinstance(error, JobFailed)
    assert error.failure == failure
    assert str(error) == "KeyError: 'x' (in loss())\n\nTraceback: line 3"
    assert str(JobFailed(Failure("LossError", "the loss is nan"))) == "the loss is nan"


def test_nothing_is_a_mere_refusal_once_a_step_has_begun() -> None:
    refusal = Failure.of(TaskError("no class"))
    assert refusal.at(step=0).is_refusal
    assert not refusal.at(step=1).is_refusal
    assert isinstance(refusal.at(step=1).error(), JobFailed)


@pytest.mark.parametrize("code", [1, 2, 130, 143])
def test_a_failed_job_has_the_exit_code_of_its_failure(code: int) -> None:
    assert JobFailed(Failure("Interrupted", "stopped at once", exit_code=code)).exit_code == code


def test_the_samples_that_it_is_about_travel_with_a_failure() -> None:
    error = pickle.loads(pickle.dumps(LossError("the loss is nan", [17, 3])))
    failure = Failure.of(error)
    assert failure.samples == (17, 3)
    fields = json.loads(json.dumps(failure.to_dict()))
    assert fields["samples"] == [17, 3]
    assert Failure.from_dict(fields) == failure
    assert "samples" not in Failure("LossError", "nan").to_dict()


def test_a_place_is_told_by_the_names_that_people_know() -> None:
    assert Failure("E", "", worker=2, lane=0, step=3).place_in_words == "worker 2, lane 0, step 3"
    assert Failure("E", "", worker=server_id(1), step=3).place_in_words == "server 1, step 3"
