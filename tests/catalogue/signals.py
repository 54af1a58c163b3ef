"""Jobs that are stopped, and processes that die. The tests that do it are in tests/cli."""

from catalogue.case import Case
from catalogue.page import Page

AT_ONCE = Case("Ctrl-C twice", story="The first waits for the running step, which takes long; the second does not.")
PAGE = Page("signals", "Jobs that are stopped, and processes that die", (AT_ONCE,))
