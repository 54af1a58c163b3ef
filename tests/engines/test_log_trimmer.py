from pathlib import Path

import pytest

from quorate.engines.local import LogTrimmer


def trimmer(folder: Path) -> LogTrimmer:
    return LogTrimmer(folder, limit=1000, beginning=100, end=200)


def test_a_long_log_looking_its_beginning_and_its_end_and_says_what_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "worker-0.log"
    content = "".join(f"line {number:4}\n" for number in range(200)).encode()
    with file.open("ab", buffering=0) as writer:
        writer.write(content)
        trimmer(tmp_path).trim(0.0)
        writer.write(b"the last line\n")
    before, note, after = file.read_bytes().partition(b"\n--- 1700 bytes were cut out here")
    assert note
    assert before == content[:100]
    assert after.endswith(content[-200:] + b"the last line\n")
    assert file.stat().st_size < 450


def test_short_logs_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"x" * 1000)
    (tmp_path / "worker-0.status").write_bytes(b"x" * 2000)
    trimmer(tmp_path).trim(0.0)
    assert (tmp_path / "worker-0.log").stat().st_size == 1000
    assert (tmp_path / "worker-0.status").stat().st_size == 2000


def test_logs_are_looked_at_now_and_then(tmp_path: Path) -> None:
    looking = trimmer(tmp_path)
    looking.trim(5.0)
    file = tmp_path / "worker-0.log"
    file.write_bytes(b"x" * 2000)
    looking.trim(5.1)
    assert file.stat().st_size == 2000
    looking.trim(6.0)
    assert file.stat().st_size < 450


def test_a_log_that_cannot_be_cut_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"x" * 2000)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr(Path, "open", refuse)
    trimmer(tmp_path).trim(0.0)
    assert "which grows large: not allowed" in caplog.text
