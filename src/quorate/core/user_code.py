"""The border between Quorate and the user's code: what is raised there comes back as the user's own traceback."""

import importlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quorate.core.errors import QuorateError, UserCodeError

# With its slash: a user's folder may be called quorate-experiments and stand beside the package.
PACKAGE = f"{Path(__file__).parents[1]}/"
IMPORTLIB = f"{Path(importlib.__file__).parent}{os.sep}"
TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"


@contextmanager
def user_code(where: str) -> Iterator[None]:
    """Turn an exception of the user's code into a `UserCodeError` that says where it was called from.

    A bare SystemExit counts too: a worker must not vanish because a task calls `sys.exit()`.
    """
    try:
        yield
    except QuorateError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{describe(error)} (in {where})", user_traceback(error)) from error


def describe(error: BaseException) -> str:
    """Type and text of an exception, in one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames of Quorate and torch at its top: it begins where the user's code does."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        part.stack = _from_users_frame(part.stack)
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()


def _from_users_frame(frames: traceback.StackSummary) -> traceback.StackSummary:
    first = next((i for i, frame in enumerate(frames) if _is_users(frame.filename)), None)
    if first is None:  # raised by torch itself, in nobody's code: a backward pass
        first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(PACKAGE)), 0)
    return traceback.StackSummary.from_list(frames[first:])


def _is_users(file: str) -> bool:
    return not file.startswith((PACKAGE, IMPORTLIB, "<frozen ")) and TORCH not in file
