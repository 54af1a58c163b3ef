import re
from pathlib import Path

import pytest

from quorate.spec.job import TaskReference


def test_a_file() -> None:
    assert TaskReference.parse("tasks/digits.py:Digits") == TaskReference("Digits", file=Path("tasks/digits.py"))


def test_a_module() -> None:
    assert TaskReference.parse("package.digits:Digits") == TaskReference("Digits", module="package.digits")


@pytest.mark.parametrize("text", ["digits.py:Digits", "/data/a:b/digits.py:Digits", "package.digits:Digits"])
def test_it_is_spelled_as_it_was_read(text: str) -> None:
    assert str(TaskReference.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("digits.py", "digits.py:MyTask"),
        ("", "task.py:MyTask"),
        ("digits.py:", "name of a class"),
        ("digits.py:3d", "name of a class"),
        ("tasks/digits:Digits", "tasks/digits.py:Digits"),
        (":Digits", "A file or a module"),
        ("package..digits:Digits", "A file or a module"),
        ("my digits:Digits", "A file or a module"),
    ],
)
def test_what_to_write_instead(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=re.escape(advice)):
        TaskReference.parse(text)


def test_a_file_is_found_from_the_folder_of_the_job(tmp_path: Path) -> None:
    placed = TaskReference.parse("../digits.py:Digits").within(tmp_path / "jobs")
    assert placed.file == tmp_path.resolve() / "digits.py"
    assert TaskReference.parse("a.b:C").within(tmp_path) == TaskReference.parse("a.b:C")
    assert TaskReference.parse("/x/y.py:C").within(tmp_path).file == Path("/x/y.py").resolve()
