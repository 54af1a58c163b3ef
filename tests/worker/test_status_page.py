from pathlib import Path

import numpy
import pytest

from quorate.storage.run_folder import RunFolder
from quorate.training.activity import Activity
from quorate.worker.status import MOST_SAMPLES, Status, StatusPage, read_status, status_file


def test_the_last_word_of_a_worker_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.status"
    assert read_status(file) is None
    page = StatusPage(file)
    assert read_status(file) is None
    page.write(7, "compute", 3)
    assert read_status(file) == page.status == Status(7, "compute", 3)
    page.write(8, "apply")
    assert read_status(file) == Status(8, "apply", None)
    file.write_bytes(b"cut")
    assert read_status(file) is None


def test_the_samples_of_a_lane_are_read_from_the_file_while_the_worker_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.status"
    page = StatusPage(file)
    activity = Activity(page.write, page.write_samples)
    activity.begin_step(7)
    with activity.during("data", 3):
        assert read_status(file) == Status(7, "data", 3)
        activity.write_samples(2, numpy.array([5, 2**40, 0]).data)
        assert read_status(file) == Status(7, "data", 3, 2, (5, 2**40, 0), 3)
    with activity.during("compute", 3):
        assert read_status(file) == Status(7, "compute", 3, 2, (5, 2**40, 0), 3)
    with activity.during("data", 4):
        assert read_status(file) == Status(7, "data", 4)  # what lane 3 has read is not taken for its samples
        activity.write_samples(2, numpy.array([], dtype=numpy.int64).data)
        assert read_status(file) == Status(7, "data", 4, 2)
    with activity.during("exchange"):
        assert read_status(file) == Status(7, "exchange")
    activity.begin_step(8)
    with activity.during("data", 4):
        assert read_status(file) == Status(8, "data", 4)
        activity.write_samples(2, numpy.arange(10 * MOST_SAMPLES).data)
        assert read_status(file) == Status(8, "data", 4, 2, tuple(range(MOST_SAMPLES)), 10 * MOST_SAMPLES)


def test_a_page_that_cannot_be_kept_costs_detail_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = StatusPage(tmp_path / "no such folder" / "worker-0.status")
    assert "cannot keep a status page" in caplog.text
    page.write(7, "compute", 3)
    assert page.status == Status(7, "compute", 3)


def test_pages_lie_among_the_logs(tmp_path: Path) -> None:
    assert status_file(RunFolder(tmp_path / "run"), 2) == tmp_path / "run" / "logs" / "worker-2.status"
