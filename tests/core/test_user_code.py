"""The user sees the user's own code: neither frames of Quorate nor a worker that vanishes."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.core.errors import LossError, QuorateError, RunError, TaskError, UserCodeError
from quorate.core.user_code import building_code, describe, is_installed, user_code

PACKAGE = Path(quorate.__path__[0])


def code_in(file: str, text: str) -> Callable[..., Any]:
    """A function `run` whose frames say that they are in this file."""
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def caught(run: Callable[..., Any]) -> UserCodeError:
    with pytest.raises(UserCodeError) as raised, user_code("loss()"):
        run()
    return raised.value


def test_an_exception_becomes_one_sentence_that_says_where_it_was() -> None:
    error = caught(lambda: dict[str, int]()["missing"])
    assert str(error) == "KeyError: 'missing' (in loss())"
    assert isinstance(error.__cause__, KeyError)


def test_the_traceback_begins_at_the_users_frame() -> None:
    inner = code_in("/home/someone/task.py", "def run():\n    return 1 / 0")
    outer = code_in(f"{PACKAGE}/training/lane.py", "def run(inner):\n    return inner()")

    with pytest.raises(UserCodeError) as raised:
        code_in(f"{PACKAGE}/core/elsewhere.py", BORDER)(lambda: outer(inner))
    lines = raised.value.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "quorate/core" not in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert any("/home/someone/task.py" in line for line in lines)


BORDER = """
from quorate.core.user_code import user_code
def run(inner):
    with user_code("loss()"):
        inner()
"""


def test_a_call_back_into_quorate_ends_at_the_users_line() -> None:
    """`self.log` may raise, and says why; where in our code it does so helps nobody."""
    ours = code_in(f"{PACKAGE}/task/task.py", "def run():\n    raise ValueError('no number')")
    users = code_in("/home/someone/task.py", "def run(ours):\n    ours()")
    trace = caught(lambda: users(ours)).traceback
    assert "/home/someone/task.py" in trace
    assert "task/task.py" not in trace
    assert trace.endswith("ValueError: no number")


def test_frames_of_ours_and_of_torch_between_the_users_are_left_out_but_for_the_one_that_raised() -> None:
    deep = code_in("/x/site-packages/torch/linear.py", "def run():\n    raise RuntimeError('shapes')")
    call = code_in("/x/site-packages/torch/module.py", "def run(inner):\n    inner()")
    users = code_in("/home/someone/task.py", "def run(call, inner):\n    call(inner)")
    trace = caught(lambda: users(call, deep)).traceback
    assert "module.py" not in trace
    assert trace.index("/home/someone/task.py") < trace.index("torch/linear.py")


def test_a_hint_stands_behind_the_sentence_and_the_exit_code_is_that_of_the_moment() -> None:
    with pytest.raises(UserCodeError) as raised, user_code("loss()", lambda error: f"Use less {error}."):
        raise ValueError("heat")
    assert (str(raised.value), raised.value.exit_code) == ("ValueError: heat (in loss()). Use less heat.", 1)
    with pytest.raises(UserCodeError) as raised, building_code("model()"):
        raise ValueError("heat")
    assert (str(raised.value), raised.value.exit_code) == ("ValueError: heat (in model())", 2)


def test_a_folder_whose_name_begins_as_the_package_does_is_the_users() -> None:
    users = code_in(f"{PACKAGE}-experiments/task.py", "def run():\n    return 1 / 0")
    with pytest.raises(UserCodeError) as raised:
        code_in(f"{PACKAGE}/core/elsewhere.py", BORDER)(users)
    assert raised.value.traceback.splitlines()[1].strip().startswith(f'File "{PACKAGE}-experiments/task.py"')


def test_an_exception_without_a_frame_of_the_users_keeps_all_its_frames() -> None:
    with pytest.raises(UserCodeError) as raised:
        code_in(f"{PACKAGE}/core/elsewhere.py", BORDER)(
            code_in(f"{PACKAGE}/core/deeper.py", "def run():\n    raise OSError('disk')")
        )
    assert "deeper.py" in raised.value.traceback


def test_a_syntax_error_shows_the_users_line(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("def broken(:\n    pass\n")
    error = caught(lambda: compile(file.read_text(), str(file), "exec"))
    assert "def broken(:" in error.traceback
    assert str(file) in error.traceback
    assert "importlib" not in error.traceback


def test_leaving_by_sys_exit_is_an_error_too() -> None:
    assert str(caught(lambda: sys.exit(3))) == "SystemExit: 3 (in loss())"


def test_a_keyboard_interrupt_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt), user_code("loss()"):
        raise KeyboardInterrupt


def test_an_error_that_our_own_code_raises_about_the_job_goes_through_as_it_is() -> None:
    error = LossError("the loss is nan")
    ours = code_in(f"{PACKAGE}/training/lane.py", "def run(error):\n    raise error")
    with pytest.raises(LossError) as raised, user_code("loss()"):
        ours(error)
    assert raised.value is error


@pytest.mark.parametrize("error", [TaskError("no classes"), LossError("too high")])
def test_an_error_of_quorates_that_the_task_raises_is_the_tasks_own(error: QuorateError) -> None:
    """Once the job is under way it is no refusal, which would throw the run away."""
    with pytest.raises(UserCodeError) as raised, user_code("loss()"):
        raise error
    assert (raised.value.message, raised.value.exit_code) == (f"{describe(error)} (in loss())", 1)
    assert raised.value.traceback.endswith(str(error))
    with pytest.raises(type(error)) as early, building_code("model()"):
        raise error
    assert early.value is error


def test_a_request_of_the_tasks_that_we_refuse_does_not_refuse_the_job() -> None:
    ours = code_in(f"{PACKAGE}/api/result.py", "def run(error):\n    raise error")
    assert caught(lambda: ours(RunError("there is no run x"))).exit_code == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError(), "ValueError"),
        (ValueError("  "), "ValueError"),
        (RuntimeError(" \n real"), "RuntimeError: real"),
    ],
)
def test_an_exception_in_one_line(error: Exception, text: str) -> None:
    assert describe(error) == text


def test_what_came_with_python_quorate_or_a_package_is_installed(tmp_path: Path) -> None:
    """By one rule for all who ask: which files are kept with a run, and whose objects are watched."""
    for folder in ("site-packages", "dist-packages"):
        assert is_installed(tmp_path / folder / "package" / "module.py")
    assert is_installed(ast.__file__)
    assert is_installed(quorate.__file__)
    assert not is_installed(__file__)
    assert not is_installed(tmp_path / "my-site-packages" / "task.py")
    (tmp_path / "cache").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "linked").symlink_to(tmp_path / "cache")
    assert is_installed(tmp_path / "site-packages" / "linked" / "module.py")
