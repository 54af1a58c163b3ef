"""What the launcher and the fork server say to each other, as JSON lines over a socket pair that only they hold."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

PREPARE, READY, FAILED = "prepare", "ready", "failed"
START, STARTED, EXITED = "start", "started", "exited"


class Messages:
    """One end of the conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._partial = b""
        self.closed = False

    def fileno(self) -> int:
        """To wait for."""
        return self._connection.fileno()

    def send(self, what: str, **fields: Any) -> None:
        """Say something; the other side may be gone, which is learnt by reading."""
        try:
            self._connection.sendall(json.dumps({"what": what, **fields}).encode() + b"\n")
        except OSError:
            self.closed = True

    def read(self) -> Iterator[dict[str, Any]]:
        """What has arrived. `closed` is set at the end of the conversation."""
        try:
            received = self._connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self.closed = True
        *lines, self._partial = (self._partial + received).split(b"\n")
        return (json.loads(line) for line in lines)

    def end(self) -> None:
        """Say nothing more, which the other side takes for the end; what it still says can be read."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the conversation."""
        self._connection.close()
