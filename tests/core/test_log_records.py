import logging

import pytest

from quorate.core.log_records import Place, RecordHandler, also_logging


def test_jobs_that_overlap_leave_the_logger_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("quorate")
    before = ours.level, ours.propagate, list(ours.handlers)
    first: list[str] = []
    second: list[str] = []
    one, other = (
        also_logging(RecordHandler(Place("launcher", name), kept.append), "info")
        for name, kept in (("one", first), ("other", second))
    )
    one.__enter__()
    other.__enter__()
    logging.getLogger("quorate.test").warning("once")
    one.__exit__(None, None, None)
    logging.getLogger("quorate.test").info("not for a terminal")
    other.__exit__(None, None, None)
    assert (len(first), len(second)) == (1, 2)
    assert [record.message for record in caplog.records] == ["once"], "whoever listens hears it once"
    assert (ours.level, ours.propagate, ours.handlers) == before
