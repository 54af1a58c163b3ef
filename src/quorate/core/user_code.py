"""The border between Quorate and the user's code: what is raised there comes back as the user's own traceback."""

import bdb
import importlib
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from quorate.core.errors import DebuggerQuit, JobError, QuorateError, RequestError, UserCodeError

# With its slash: a user's folder may be called quorate-experiments and stand beside the package.
PACKAGE = f"{Path(__file__).parents[1]}/"
IMPORTLIB = f"{Path(importlib.__file__).parent}{os.sep}"
_PACKAGES = ("site-packages", "dist-packages")
TORCH = tuple(f"{os.sep}{folder}{os.sep}torch{os.sep}" for folder in _PACKAGES)
_FOREIGN = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), PACKAGE)
)

RAISED = (Exception, SystemExit, KeyboardInterrupt)
"""What user code may raise. A worker must not vanish for any of it: the others would do the step again, and vanish."""

Hint = Callable[[BaseException], str]
"""What to say beside the text of an exception; nothing for one that speaks for itself."""


# Of a process, since it is the process that takes long in somebody's code.
_announce: Callable[[str], None] | None = None


@contextmanager
def announcing(tell: Callable[[str], None]) -> Iterator[None]:
    """For a `with` block around a setup: what is built now is told before its code runs, which may take hours."""
    global _announce
    _announce = tell
    try:
        yield
    finally:
        _announce = None


class user_code:  # noqa: N801 (read as a statement: with user_code("loss()"))
    """Turn an exception of the user's code into a `UserCodeError` that says where it was called from.

    A bare SystemExit counts too: a worker must not vanish because a task calls `sys.exit()`. So does a
    KeyboardInterrupt where nobody listens to Ctrl-C, as in workers: the task has raised it. And so does an error of
    Quorate's tree that the task raises itself once the job is under way: a `TaskError` would pass for a refusal then.
    """

    __slots__ = ("_exit_code", "_hint", "_where")

    def __init__(self, where: str, hint: Hint = lambda _: "", *, exit_code: int = JobError.exit_code) -> None:
        self._where = where
        self._hint = hint
        self._exit_code = exit_code

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RAISED):
            blame_user_code(error, self._where, self._hint, self._exit_code)


def blame_user_code(
    error: BaseException, where: str, hint: Hint = lambda _: "", exit_code: int = JobError.exit_code
) -> None:
    """Raise an exception of the user's code as a `UserCodeError`. Returns if it is ours, to be raised as it is.

    For whoever cannot afford a `with` block: one costs three calls, and `try` nothing.
    """
    if is_ctrl_c(error):
        return
    if (left := quit_in(error, where)) is not None:
        raise left from None
    if isinstance(error, QuorateError) and (exit_code == RequestError.exit_code or _is_ours(error)):
        return
    message = with_hint(f"{describe(error)} (in {where})", hint(error) or first_aid(error))
    raise UserCodeError(message, user_traceback(error), exit_code) from error


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a person has interrupted this process. Where nobody listens to Ctrl-C, the task has raised it."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def building_code(where: str) -> user_code:
    """The same for what runs before the first step: what is raised there is a mistake in the request."""
    if _announce is not None:
        _announce(where)
    return user_code(where, exit_code=RequestError.exit_code)


def describe(error: BaseException) -> str:
    """Type and text of an exception, in one line."""
    # What torch says of its own switch is long, and none that a job has.
    text = str(error).strip().split("\n")[0].partition(", but you set 'torch.use_deterministic_algorithms")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def with_hint(message: str, hint: str) -> str:
    """A message and, if there is one, the hint behind it."""
    return f"{message}. {hint}" if hint else message


def user_traceback(error: BaseException) -> str:
    """The traceback as the user's own frames, and below them the one that raised, unless it is ours."""
    told = traceback.TracebackException.from_exception(error)
    raised: BaseException | None = error
    part: traceback.TracebackException | None = told
    while part is not None and raised is not None:
        part.stack = _users_frames(part.stack, raised)
        raised = raised.__cause__ or raised.__context__
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()


def users_lines(error: BaseException) -> list[str]:
    """The lines of the user's code through which an exception has come."""
    return [frame.line or "" for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]


def _users_frames(frames: traceback.StackSummary, raised: BaseException) -> traceback.StackSummary:
    kept = [frame for frame in frames[:-1] if _is_users(frame.filename)]
    # A syntax error stands below the frames of the import, which say nothing: its own text names file and line.
    if isinstance(raised, SyntaxError):
        return traceback.StackSummary.from_list(kept)
    if kept or not frames or _is_users(frames[-1].filename):
        last = [frame for frame in frames[-1:] if not frame.filename.startswith(PACKAGE)]
        return traceback.StackSummary.from_list([*kept, *last])
    # Raised by torch or by us, in nobody's code, as in a backward pass: then all of it is for whoever looks into that.
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(PACKAGE)), 0)
    return traceback.StackSummary.from_list(frames[first:])


@cache
def is_installed(file: str | Path) -> bool:
    """Whether a file came with Python, Quorate or an installed package, and so is no part of anybody's project."""
    # By its name and by what that leads to: an installer may fill its folder with links.
    names = str(Path(file).absolute()), os.path.realpath(file)
    return any(name.startswith(_FOREIGN) or not set(_PACKAGES).isdisjoint(Path(name).parts) for name in names)


def _is_ours(error: QuorateError) -> bool:
    """Whether our own code raised it about the job, and not the task, nor a request that the task makes of us."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, JobError) and frame.f_code.co_filename.startswith(PACKAGE)


def _is_users(file: str) -> bool:
    return not file.startswith((PACKAGE, IMPORTLIB, "<frozen ")) and not any(folder in file for folder in TORCH)


def given(value: Any) -> str:
    """The value as a sentence names it: "nothing (None)", "a Tensor of shape (8, 3)", "the float 0.5"."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, bool | int | float):
        return f"the {kind} {value!r}"
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 40 else value[:37] + "..."}"'
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)} values" if len(value) != 1 else f"a {kind} of one value"
    shape = getattr(value, "shape", None)
    article = "an" if kind[:1] in "AEIOaeio" else "a"
    return f"a {kind} of shape {tuple(shape)}" if isinstance(shape, tuple) else f"{article} {kind}"


def likely_slip(value: Any) -> str:
    """What was probably forgotten, to follow a sentence; nothing if that is not plain to see."""
    if value is None:
        return " Is a `return` missing?"
    return f" Is `()` missing after {value.__name__}?" if isinstance(value, type) else ""


def first_aid(error: BaseException) -> str:
    """What to do about an exception of a user's code; nothing for one that speaks for itself."""
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        return _no_file(error.filename)
    return remedy_in(_REMEDIES, f"{type(error).__name__}: {error}")


def remedy_in(table: Iterable[tuple[str, str | Callable[..., str]]], text: str, *context: Any) -> str:
    """The remedy of the first pattern of a table that is found in a text; one that is a function is given what was
    found, and the context. Nothing where none is found."""
    for pattern, remedy in table:
        found = re.search(pattern, text, re.IGNORECASE)
        if found is not None:
            return remedy(found, *context) if callable(remedy) else remedy
    return ""


def _no_file(name: str) -> str:
    if Path(name).is_absolute():
        return "Fix the path, or make it one of the job's `params`."
    # A run that is resumed elsewhere: it was begun in the folder of the task most often, or in the one above.
    near = (folder for entry in sys.path for folder in (Path(entry), Path(entry).parent))
    there = next((f", and there is one in {folder.absolute()}" for folder in near if (folder / name).exists()), "")
    return (
        f"A relative path counts from where the command is given, here {Path.cwd()}{there}. Make it "
        f'Path(__file__).parent / "{name}" to find it beside the task.'
    )


def _no_module(found: re.Match[str]) -> str:
    name = found[1].partition(".")[0]
    return f"Is {name} misspelt? Otherwise install it: pip install {name}. A module of your own lies beside the task."


# --- whether somebody steps through it in this process, and what a breakpoint says where nobody can

REMEDY = (
    "A worker has no terminal for a debugger. Type `quorate train job.yaml --debug`, or write "
    "quorate.train(job, debug=True): the job runs in one process, at your terminal, to the same bits."
)

# Of a process: it is the process that stands still at a breakpoint.
_is_attached = False


def is_attached() -> bool:
    """Whether the user's code runs in the process that the user has started, to be stepped through."""
    return _is_attached


@contextmanager
def attached() -> Iterator[None]:
    """For a `with` block around a job that is debugged in this process."""
    global _is_attached
    _is_attached = True
    try:
        yield
    finally:
        _is_attached = False


def refuse_breakpoints() -> None:
    """In a worker: have `breakpoint()` say how to debug. What PYTHONBREAKPOINT names may need no terminal."""
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"breakpoint() in a worker. {REMEDY}")


def quit_in(error: BaseException, where: str) -> DebuggerQuit | None:
    """What to raise where a person has left the debugger (`q`, Ctrl-D) in the user's code; None for anything else."""
    if _is_attached and isinstance(error, bdb.BdbQuit):
        return DebuggerQuit(f"the debugger was quit in {where}, and the job with it; any checkpoint so far is kept.")
    return None


_REMEDIES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^BdbQuit", REMEDY),
    (
        r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device|"
        r"Attempting to deserialize object on a CUDA device",
        'There is no GPU here that this job uses. Leave out .cuda() and .to("cuda"): model and batches are put on the '
        "job's device (`device`) as they are; a tensor made in loss() is put beside others with device=batch.device.",
    ),
    (
        r"element 0 of tensors does not require grad",
        "If that is a backward() in loss() or metrics(), leave it out: Quorate calls it for what loss() returns.",
    ),
    (r"^ModuleNotFoundError: No module named '([^']+)'", _no_module),
    (
        r"before Module\.__init__\(\) call",
        "Call super().__init__() first, in the __init__ of the model.",
    ),
    (
        r"^(TabError|IndentationError)",
        "Indent with four spaces, and never with tabs.",
    ),
    (
        r"^SyntaxError",
        "Fix the line that is named below; often the mistake is at its end, or in the line before.",
    ),
)
