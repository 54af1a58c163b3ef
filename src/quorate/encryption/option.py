"""What encrypted checkpoints add to a job file: the key `encrypt` of `checkpoint`."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from quorate.core.errors import Problem
from quorate.core.regular_file import read_regular
from quorate.spec.keys import PREFIX, Allowed, FilePath
from quorate.spec.options import Option, Said, Sealing

_LONGEST_KEY = 256


def _checked_variable(name: str | None) -> str | None:
    if name is None:
        return None
    if re.fullmatch(r"[0-9A-Fa-f]{64}", name):
        raise ValueError("This looks like the key itself. Put it into a variable, and name the variable here.")
    if name.startswith(PREFIX):
        raise ValueError(f"Variables that begin with {PREFIX} set keys of the job: choose another name.")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("A name has letters, digits and underscores, and does not start with a digit.")
    return name


class EncryptSpec(Sealing):
    """Where the key of encrypted checkpoints is: in a file or in an environment variable."""

    key_file: Annotated[
        FilePath | None, Field(min_length=1), Allowed("the path of a file that holds the key, or null")
    ] = None
    """The file that holds the key."""
    key_env: Annotated[
        str | None,
        AfterValidator(_checked_variable),
        Allowed("the name of an environment variable that holds the key, or null"),
    ] = None
    """The environment variable that holds the key."""

    opened_by: ClassVar[str] = "quorate.encryption.key:read_key"

    def secrets(self) -> Iterator[str]:
        if self.key_env:
            yield os.environ.get(self.key_env, "")
        if self.key_file:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # a key may be plain bytes, which nobody prints
                yield read_regular(Path(self.key_file).expanduser())[:_LONGEST_KEY].decode("ascii")


def _one_key(job: Any, said: Said) -> Iterator[Problem]:
    encrypt = job.checkpoint.sealing
    if isinstance(encrypt, EncryptSpec) and (encrypt.key_file is None) == (encrypt.key_env is None):
        text = (
            "neither key_file nor key_env is given"
            if encrypt.key_file is None
            else "both key_file and key_env are given"
        )
        yield Problem(
            "checkpoint.encrypt",
            f"{text}{said('checkpoint.encrypt')}",
            "Give exactly one: key_file: /path/of/key (a file), or key_env: MY_KEY (an environment variable).",
        )


_ENCRYPT = Annotated[
    EncryptSpec | None,
    Field(
        description="Encrypt checkpoints. Then only checkpoints that were written with that key are used; `quorate "
        "checkpoints rekey` rewrites others with it."
    ),
]
OPTION = Option(
    keys={"checkpoint": {"encrypt": (_ENCRYPT, None)}},
    rules={_one_key: frozenset({"checkpoint"})},
)
