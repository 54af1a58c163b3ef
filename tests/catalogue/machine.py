"""Trouble with the machine: ports, networks and disks. The tests that make it are in tests/cli."""

from catalogue.case import Case
from catalogue.page import Page

PORT = Case("A port that is in use", job="port: 9999", story="Another program listens there.")
FULL_BEFORE = Case("A disk that is full", story="`runs` is on a disk without space.")
READ_ONLY = Case("A disk that is read-only", story="`runs` is on such a disk.")
NO_LOOPBACK = Case("A machine without a loopback interface", story="`lo` is down, as in a bare network namespace.")
PAGE = Page("machine", "Trouble with ports, networks and disks", (PORT, NO_LOOPBACK, FULL_BEFORE, READ_ONLY))
