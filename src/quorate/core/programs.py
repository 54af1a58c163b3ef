"""Where the programs of the system are."""

import os
import shutil

SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Where programs for root are; not everybody's PATH has them."""


def find_program(name: str) -> str | None:
    """The path of a program; none if it is not installed."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS]))
