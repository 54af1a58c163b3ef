"""Errors cross processes: each must come out of a pickle as it went in."""

import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Iterator

import pytest

import quorate
from quorate.core import errors
from quorate.core.errors import (
    JobError,
    JobFileError,
    LinkError,
    OutputError,
    PeerLost,
    Problem,
    QuorateError,
    RequestError,
    UserCodeError,
)
from quorate.core.failure import Failure, Remains

for found in pkgutil.walk_packages(quorate.__path__, "quorate."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # of an extra that is not installed here
            assert error.name is not None and not error.name.startswith("quorate")

VALUES = {
    "source": "job.yaml",
    "problems": (Problem("lanes", "is 0", "Use 1."), Problem("seed", "is text")),
    "remains": Remains("tiny-0001", "/runs/tiny-0001", "runs/tiny-0001/logs", None, "train again"),
    "exit_code": 2,
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


def drawn() -> dict[str, str]:
    """Name → parent of every error in the tree of the module's docstring: by its indentation, or by whom it stands
    beside, or in the parentheses of which it stands."""
    assert errors.__doc__ is not None
    above: list[tuple[int, str]] = []
    parents = {}
    for line in errors.__doc__.split("::")[1].splitlines():
        names = list(re.finditer(r"(\(?)([A-Z]\w+)(\)?)", line))
        if names and not re.match(r" *│ ", line):
            place, head = names[0].start(), names.pop(0)[2]
            above = [(other, parent) for other, parent in above if other < place]
            parents[head] = above[-1][1] if above else "Exception"
            above.append((place, head))
        last = within = ""
        for found in names:
            within = last if found[1] else within
            parents[found[2]] = within or above[-1][1]
            within, last = "" if found[3] else within, found[2]
    return parents


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    assert drawn() == {error_type.__name__: error_type.__base__.__name__ for error_type in tree(QuorateError)}  # type: ignore[union-attr]


def test_a_wrong_request_and_a_failed_job_have_different_exit_codes() -> None:
    assert {error_type.exit_code for error_type in tree(RequestError)} == {2}
    assert {error_type.exit_code for error_type in tree(JobError)} == {1}
    assert OutputError.exit_code == 1


def test_an_exception_before_the_first_step_counts_as_a_wrong_request() -> None:
    assert UserCodeError("no", "").exit_code == 1
    early = UserCodeError("no", "", RequestError.exit_code)
    assert (early.exit_code, pickle.loads(pickle.dumps(early)).exit_code) == (2, 2)


def test_a_job_file_error_tells_every_mistake() -> None:
    error = JobFileError("job.yaml", [Problem("lanes", "is 0", "Use at least 1."), Problem("seed", "is text")])
    assert str(error) == "job.yaml has 2 mistakes:\n  lanes: is 0. Use at least 1.\n  seed: is text."
    assert "a mistake:" in str(JobFileError("job.yaml", [Problem("lanes", "is 0")]))


def test_a_lost_peer_is_trouble_between_processes_and_names_the_peer() -> None:
    error = PeerLost("worker 2", "it closed the connection")
    assert isinstance(error, LinkError)
    assert str(error) == "worker 2 is gone: it closed the connection"
    assert error.worker == 2
    assert PeerLost("worker 12 (10.0.0.2:4000)", "end of file").worker == 12
    # Neither is a link between two workers that has failed.
    assert PeerLost("worker 2", PeerLost.CLOSED_HERE).worker is None
    assert PeerLost("the coordinator", "end of file").worker is None
