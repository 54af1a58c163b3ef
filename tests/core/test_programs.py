from pathlib import Path

import pytest

from quorate.core.processes import find_program


def test_programs_for_root_are_found_without_a_path_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only-for-root").touch(mode=0o755)
    monkeypatch.setattr("quorate.core.processes.SYSTEM_FOLDERS", str(tmp_path))
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert find_program("only-for-root") == str(tmp_path / "only-for-root")
    assert find_program("no-such-program") is None
