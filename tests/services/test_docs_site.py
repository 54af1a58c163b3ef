"""The documentation as a site, in a browser: wide and narrow, found by its search, and nothing from elsewhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from services.browser import Browser

pytestmark = pytest.mark.services
ROOT = Path(__file__).resolve().parents[2]
PAGES = ["index.html", "tutorial/index.html", "how-to/recover.html", "reference/job.html", "reference/cli.html"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it, which fails where a link leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_asks_nobody_else(browser: Browser, site: Path, page: str, width: int) -> None:
    visit = browser.open(site / page, width=width)
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    assert all(url.startswith(site.as_uri()) for url in visit.requests)
    visit.page.close()


def test_the_search_finds_a_page(browser: Browser, site: Path, address: str) -> None:
    page = browser.open(site / "index.html").page
    page.goto(f"{address}/index.html")
    page.fill("input.md-search__input", "resize a running job")
    page.wait_for_selector(".md-search-result__link[href*='how-to/resize.html']", state="attached")
    page.close()
