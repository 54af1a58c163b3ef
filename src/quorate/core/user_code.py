"""The border between Quorate and the user's code: what is raised there comes back as the user's own traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quorate.core.errors import QuorateError, UserCodeError

PACKAGE = str(Path(__file__).parents[1])


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
    """The traceback without the frames of Quorate at its top: it begins where the user's code does."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith((PACKAGE, "<frozen "))), 0)
    stack = "".join(traceback.format_list(frames[first:]))
    return f"Traceback (most recent call last):\n{stack}{''.join(traceback.format_exception_only(error))}".rstrip()
