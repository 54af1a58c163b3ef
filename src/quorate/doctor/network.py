"""Whether processes of this machine can reach each other."""

import socket
import subprocess
import sys
from collections.abc import Callable

from quorate.doctor.finding import Finding, Level

HOST = "127.0.0.1"
GREETING = b"quorate"
REMEDY = "Let processes of this machine talk over 127.0.0.1: look at its firewall, or at the container's network."

_CALLER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as peer:
    peer.sendall(sys.argv[4].encode())
"""


def check_loopback(talk: Callable[[], int]) -> Finding:
    """Two processes talk; `talk` returns the port over which they did."""
    try:
        port = talk()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ports", Level.PROBLEM, f"two processes cannot talk over {HOST}: {error}", REMEDY)
    return Finding("ports", Level.OK, f"two processes have talked over {HOST}:{port}")


def talk_to_a_child(patience: float) -> int:
    """Bind a free port and let another process call it."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(patience)
        port: int = server.getsockname()[1]
        arguments = [HOST, str(port), str(patience), GREETING.decode()]
        command = [sys.executable, "-I", "-c", _CALLER, *arguments]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as caller:
            try:
                _await_greeting(server)
                if caller.wait(patience) != 0:
                    raise ConnectionError(f"the process that called has failed with exit code {caller.returncode}")
            finally:
                caller.kill()
    return port


def _await_greeting(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        peer.settimeout(server.gettimeout())
        heard = peer.recv(len(GREETING), socket.MSG_WAITALL)
    if heard != GREETING:
        raise ConnectionError(f"{heard!r} was heard where {GREETING!r} was said")
