"""What is found out on a node of a cluster, by itself and towards the others.

It is sent there as it stands, since the node may have no Quorate: so it imports nothing but Python's own.
"""

import importlib.metadata
import platform
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "torch", "quorate")
PIECE = 2**20
CONNECT_S = 5.0


class NodeProbe:
    """Looks at its own node, listens for the others, and sends to them."""

    def __init__(self) -> None:
        # A port that is open to all of the network swallows nothing from whoever does not know this.
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None

    def facts(self) -> dict[str, Any]:
        versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
        return {"host": socket.gethostname(), "versions": versions}

    def clock(self) -> float:
        return time.time()

    def listen(self, host: str) -> tuple[str, int, bytes]:
        """Swallow what others send, from now on; where, and with which word it begins."""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        threading.Thread(target=self._swallow, args=(self._listener,), daemon=True).start()
        return host, self._listener.getsockname()[1], self._token

    def send(self, host: str, port: int, token: bytes, size: int) -> tuple[float, str]:
        """Send so many bytes to another node; how many a second arrived, or why none did."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
                connection.settimeout(CONNECT_S * 2)
                connection.sendall(token)
                piece, began = bytes(PIECE), time.perf_counter()
                for _ in range(size // PIECE):
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1) != b"!":  # not before all of it is there
                    return 0.0, "another process listens there"
                return size / max(time.perf_counter() - began, 1e-9), ""
        except OSError as error:
            return 0.0, error.strerror or str(error)

    def read_and_answer(self, folder: str, question: str, answer: str) -> tuple[str, str]:
        """What stands in a file of a folder, and what was wrong: the answer is written beside it."""
        try:
            read = (Path(folder) / question).read_text()
            (Path(folder) / answer).write_text(read[::-1])
            return read, ""
        except OSError as error:
            return "", error.strerror or str(error)

    def _swallow(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(CONNECT_S * 2)
                self._read_to_end(connection)

    def _read_to_end(self, connection: socket.socket) -> None:
        try:
            if connection.recv(len(self._token), socket.MSG_WAITALL) != self._token:
                return
            while connection.recv(PIECE):
                pass
            connection.sendall(b"!")
        except OSError:
            return


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
