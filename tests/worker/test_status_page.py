from pathlib import Path

import pytest

from quorate.storage.run_folder import RunFolder
from quorate.worker.status import Status, StatusPage, read_status, status_file


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


def test_a_page_that_cannot_be_kept_costs_detail_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = StatusPage(tmp_path / "no such folder" / "worker-0.status")
    assert "cannot keep a status page" in caplog.text
    page.write(7, "compute", 3)
    assert page.status == Status(7, "compute", 3)


def test_pages_lie_among_the_logs(tmp_path: Path) -> None:
    assert status_file(RunFolder(tmp_path / "run"), 2) == tmp_path / "run" / "logs" / "worker-2.status"
