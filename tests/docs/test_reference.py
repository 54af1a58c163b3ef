"""The pages of the reference are those that the code gives."""

import runpy
from collections.abc import Callable

import pytest

from docs.first_hour import ROOT

PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_up_to_date(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == PAGES[page](), "run: .venv/bin/python scripts/reference.py"
