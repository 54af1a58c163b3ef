"""Errors cross processes: each must come out of a pickle as it went in."""

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import quorate
from quorate.core.errors import JobError, JobFileError, LinkError, PeerLost, Problem, QuorateError, RequestError
from quorate.core.failure import Failure

for found in pkgutil.walk_packages(quorate.__path__, "quorate."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)

VALUES = {
    "source": "job.yaml",
    "problems": (Problem("lanes", "is 0", "Use 1."), Problem("seed", "is text")),
    "failure": Failure("LossError", "the loss is nan", step=3, traceback="Traceback: a line"),
}


def tree(root: type[QuorateError]) -> Iterator[type[QuorateError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def example(error_type: type[QuorateError]) -> QuorateError:
    if "__init__" not in {name for base in error_type.__mro__[:-3] for name in vars(base)}:
        return error_type("what happened")
    parameters = [name for name in inspect.signature(error_type.__init__).parameters if name != "self"]
    return error_type(*(VALUES.get(name, f"the {name}") for name in parameters))


@pytest.mark.parametrize("error_type", list(tree(QuorateError)), ids=lambda error_type: error_type.__name__)
def test_an_error_survives_pickling_with_its_text_and_its_fields(error_type: type[QuorateError]) -> None:
    error = example(error_type)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is error_type
    assert again.message == error.message
    assert again.message
    assert vars(again) == vars(error)
    assert again.exit_code == error.exit_code


def test_the_walk_finds_the_errors_that_carry_fields() -> None:
    """Otherwise the test above would pass on an empty tree."""
    names = {error_type.__name__ for error_type in tree(QuorateError)}
    assert names >= {"JobFailed", "UserCodeError", "PeerLost", "JobFileError", "LeaseExpired", "RunError"}


def test_a_wrong_request_and_a_failed_job_have_different_exit_codes() -> None:
    assert {error_type.exit_code for error_type in tree(RequestError)} == {2}
    assert {error_type.exit_code for error_type in tree(JobError)} == {1}


def test_a_job_file_error_tells_every_mistake() -> None:
    error = JobFileError("job.yaml", [Problem("lanes", "is 0", "Use at least 1."), Problem("seed", "is text")])
    assert str(error) == "job.yaml has 2 mistakes:\n  lanes: is 0. Use at least 1.\n  seed: is text."
    assert "a mistake:" in str(JobFileError("job.yaml", [Problem("lanes", "is 0")]))


def test_a_lost_peer_is_trouble_between_processes_and_names_the_peer() -> None:
    error = PeerLost("worker 2", "it closed the connection")
    assert isinstance(error, LinkError)
    assert str(error) == "worker 2 is gone: it closed the connection"
