"""Jobs that are stopped, and processes that die. The tests that do it are in tests/cli."""

from catalogue.case import Case
from catalogue.page import Page

AT_ONCE = Case("Ctrl-C twice", story="The first waits for the running step, which takes long; the second does not.")
COORDINATOR_KILLED = Case("A coordinator that is killed", story="`kill -9` of the coordinator, at some step.")
NURSERY_KILLED = Case("A nursery that is killed", story="`kill -9` of the process that starts the workers.")
PAGE = Page(
    "signals",
    "Jobs that are stopped, and processes that die",
    (AT_ONCE, COORDINATOR_KILLED, NURSERY_KILLED),
)
