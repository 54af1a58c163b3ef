"""A program on a host of its own, as far as Ray is concerned: ``python ray_host_program.py FOLDER PROGRAM ARGUMENT…``.

What Ray keeps in /tmp/ray, a node's address and sockets, lies in that folder: two hosts do not share it.
`PROGRAM` is ``ray``, Ray's own command, or a module of Python's.
"""

import ctypes
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

RAYS = "/tmp/ray"
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def be_host(folder: str) -> None:
    """See that folder in the place of Ray's."""
    libc = ctypes.CDLL(None, use_errno=True)
    Path(RAYS).mkdir(exist_ok=True)
    has_failed = (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(folder.encode(), RAYS.encode(), None, _MS_BIND, None)
    )
    if has_failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    folder, program, *arguments = sys.argv[1:]
    be_host(folder)
    if program != "ray":
        os.execv(sys.executable, [sys.executable, "-m", program, *arguments])
    sys.path.append(str(Path(__file__).parents[2]))
    import_module("benchmarks.ray_nodes").be_patient(takes_jobs=False)
    # Ray looks at all processes of the machine for a cluster that is at work, and would find those of other hosts.
    services: Any = import_module("ray._private.services")
    services.find_gcs_addresses = set
    sys.argv = ["ray", *arguments]
    import_module("ray.scripts.scripts").main()


if __name__ == "__main__":
    main()
