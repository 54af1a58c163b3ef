"""Two processes as on two hosts: each in a network namespace of its own, joined by a cable of a given speed.

The namespaces have no names. Such a namespace is there for as long as a process stands in it, so however the processes
end, killed or not, the kernel removes both, and the cable with them.
"""

import ctypes
import os
import subprocess

from benchmarks.gang import Seat
from quorate.core.processes import find_program

PROGRAMS = ("ip", "tc")
RIGHTS = ("CAP_SYS_ADMIN", "CAP_NET_ADMIN")

DEVICE = "cable"
NETWORK = "192.0.2"
"""For examples only, by RFC 5737: nobody has a host there."""

BURST = "32kb"
"""What may pass at once after a rest: little more than a millisecond of a cable of 200 Mbit/s."""

QUEUE = "50ms"
"""For so long something may wait for the cable: one connection alone fills it, and loses nothing."""

_CLONE_NEWNET = 0x40000000


def plug_in(seat: Seat, mbit: float) -> str:
    """Put this process, one of two, at its end of the cable; its address there. Both sides are limited alike."""
    _enter_namespace()
    pids = seat.gather(os.getpid())
    if seat.position == 0:
        _call("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(pids[1]))
    seat.gather("the cable is there")
    address = f"{NETWORK}.{1 + seat.position}"
    _call("ip", "address", "add", f"{address}/30", "dev", DEVICE)
    limit = ("rate", f"{mbit:g}mbit", "burst", BURST, "latency", QUEUE)
    _call("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
    _call("ip", "link", "set", DEVICE, "up")
    seat.gather("both ends are up")
    return address


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise RuntimeError(
            f"the kernel gives no network namespace ({reason}): it is for root, with {' and '.join(RIGHTS)}"
        )


def _call(program: str, *arguments: str) -> None:
    done = subprocess.run([find_program(program) or program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        remedy = "it needs veth and sch_tbf of the kernel: modprobe -a veth sch_tbf"
        raise RuntimeError(f"`{program} {' '.join(arguments)}`: {reason} ({remedy})")
