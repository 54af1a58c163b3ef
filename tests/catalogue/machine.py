"""Trouble with the machine: ports and disks. The tests that make it are in tests/cli."""

from catalogue.case import Case
from catalogue.page import Page

PORT = Case("A port that is in use", job="port: 9999", story="Another program listens there.")
FULL_BEFORE = Case("A disk that is full", story="`runs` is on a disk without space.")
READ_ONLY = Case("A disk that is read-only", story="`runs` is on such a disk.")
PAGE = Page("machine", "Trouble with ports and disks", (PORT, FULL_BEFORE, READ_ONLY))
