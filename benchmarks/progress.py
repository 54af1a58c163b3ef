"""What is being measured right now, on standard error."""

from rich.live import Live
from rich.text import Text

from quorate.observe.screen import Screen


class Progress:
    """One line that changes on a terminal; a line each time in a file.

    It is drawn only when it changes, by nobody's thread: whatever draws meanwhile would be measured too.
    """

    def __init__(self, screen: Screen, is_terminal: bool) -> None:
        self._screen = screen
        self._live = Live(console=screen, auto_refresh=False, transient=True) if is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, text: str) -> None:
        """From now on, it is this."""
        if self._live is None:
            self._screen.print(Text(text), soft_wrap=True)
        else:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
