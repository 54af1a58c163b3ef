"""A real browser, and what it does with a page."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")


@dataclass
class Visit:
    """A page that was opened, what its console said, and what it asked for beyond itself."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """Opens pages in windows of any width, by day or by night."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def open(self, file: Path, width: int = 1400, scheme: str = "light") -> Visit:
        """A file, as somebody opens it from a disk."""
        page = self._chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        visit = Visit(page)
        page.on("console", lambda message: visit.complaints.append(message.text))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: visit.requests.append(request.url))
        page.goto(file.as_uri())
        return visit


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield Browser(chromium)
        chromium.close()
