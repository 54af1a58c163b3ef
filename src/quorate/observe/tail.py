"""Events as they are appended to a file."""

from pathlib import Path

from quorate.observe.event import Event


class EventTail:
    """Follows the file that a `JsonlSink` writes, from another process. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read_new(self) -> list[Event]:
        """What was appended since the last call: whole lines only, the rest is read once it is whole."""
        whole, newline, _ = self._new_bytes().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [event for line in whole.split(b"\n") if (event := _event(line)) is not None]

    def _new_bytes(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                # A file that has become shorter is another file: begin at its start.
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return b""


def _event(line: bytes) -> Event | None:
    """The event of a line, or none where a crash has left half of one."""
    try:
        return Event.from_json(line.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
