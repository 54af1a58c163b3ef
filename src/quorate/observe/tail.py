"""Events as they are appended to a file."""

from pathlib import Path

from quorate.core.errors import RunError
from quorate.core.regular_file import opened_regular
from quorate.observe.disk_watch import DiskWatch
from quorate.observe.event import Event


class EventTail:
    """Follows the file that a `JsonlSink` writes, from another process. The file may not exist yet.

    Where nothing comes because nothing can be written, it tells that itself.
    """

    def __init__(self, path: Path, watch: DiskWatch | None = None) -> None:
        self.path = path
        self.offset = 0
        self._watch = DiskWatch(path.parent) if watch is None else watch

    def read_new(self) -> list[Event]:
        """What was appended since the last call: whole lines only, the rest is read once it is whole."""
        return [event for line in self.read_lines() if (event := read_event(line)) is not None]

    def read_lines(self, limit: int = -1) -> list[str]:
        """The same as lines of JSON, so many bytes at most; where a crash has left half of one, that is among them."""
        whole, newline, _ = self._new_bytes(limit).rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        lines = [line.decode(errors="replace") for line in whole.split(b"\n") if line]
        trouble = self._watch.look(has_heard=bool(lines))
        return lines if trouble is None else [*lines, trouble.to_json()]

    def _new_bytes(self, limit: int) -> bytes:
        try:
            with opened_regular(self.path) as file:
                # A file that has become shorter is another file: begin at its start.
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunError(f"cannot read {self.path}: {error.strerror}. Move it out of the way.") from error


def read_event(line: str) -> Event | None:
    """The event of a line, or none where a crash has left half of one."""
    try:
        return Event.from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
