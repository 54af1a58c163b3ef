"""The name of a checkpoint's folder, which says where in the job it was saved."""

import re

from quorate.core.cursor import Cursor, Phase

_NAME = re.compile(r"step-(\d{8,18})(-evaluated)?")


def checkpoint_name(cursor: Cursor) -> str:
    """The folder name of a checkpoint."""
    return f"step-{cursor.step:08d}" + ("-evaluated" if cursor.phase is Phase.EVALUATED else "")


def cursor_of(name: str) -> Cursor | None:
    """The cursor in a checkpoint's folder name; none for a folder that is not one, such as a leftover."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    cursor = Cursor(int(match[1]), Phase.EVALUATED if match[2] else Phase.TRAINED)
    # With one zero too many it would be a second checkpoint of the same cursor.
    return cursor if checkpoint_name(cursor) == name else None
