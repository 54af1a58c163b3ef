"""A terminal: what a person sees after a program has written to it, and a real one for programs to write to."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

_PIECE = re.compile(r"\x1b\[\?25[lh]|\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+|\x1b")


def screen_after(text: str, width: int) -> list[str]:
    """The lines on a screen of this width, without colours; longer lines are broken as a terminal does."""
    lines, row, column = [""], 0, 0
    for piece in _PIECE.finditer(text):
        number, action = int(piece[1] or 1), piece[2]
        if piece[0] == "\n":
            row, column = row + 1, 0
        elif piece[0] == "\r":
            column = 0
        elif action == "A":
            row = max(0, row - number)
        elif action == "K":
            lines[row] = ""  # rich erases whole lines only
        elif not piece[0].startswith("\x1b"):
            for character in piece[0]:
                if column == width:
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]


class TerminalCommand:
    """The `quorate` command in a pseudo-terminal of its own; standard output and standard error both go there."""

    def __init__(self, folder: Path, width: int, *arguments: str, **environment: str) -> None:
        self.width = width
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quorate", *arguments],
            cwd=folder,
            env=inherited | {"TERM": "xterm-256color"} | environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._written: list[bytes] = []
        # A terminal is read all the time: a program that nobody listens to waits.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "TerminalCommand":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # a test has failed meanwhile
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)

    @property
    def text(self) -> str:
        """Everything that was written so far."""
        return b"".join(self._written).decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """What is on the screen now."""
        return screen_after(self.text, self.width)

    def type(self, keys: str) -> None:
        """Press keys, one after the other."""
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self, within: float = 100.0) -> int:
        """Wait for the end of the command; its exit code."""
        code = self.process.wait(within)
        self._reader.join()
        return code

    def _read(self) -> None:
        while True:
            try:
                content = os.read(self._master, 1 << 16)
            except OSError:  # the other end is closed by all
                return
            if not content:
                return
            self._written.append(content)
