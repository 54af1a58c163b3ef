"""What counts as a change of a task's code."""

import pytest

from quorate.core.task_source import TaskSource

CODE = '''"""About it."""
import torch


class Mine:
    """A task."""

    rate = 0.1

    def loss(self, x):
        """Of one batch."""
        return x * 2  # twice
'''


def source(text: str, name: str = "task.py", **others: str) -> TaskSource:
    return TaskSource(name, {name: text.encode(), **{f"{key}.py": value.encode() for key, value in others.items()}})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# twice", "# two times"),
        ("import torch\n", "import torch  # noqa\n\n\n"),
        ("x * 2", "(x\n            * 2)"),
        ("rate = 0.1", "rate=0.10"),
        ('"""About it."""\n', ""),
        ('"""A task."""', '"""Another task."""'),
        ('"""Of one batch."""', "'''Of a lane.'''"),
    ],
)
def test_comments_blank_lines_formatting_and_docstrings_do_not_count(before: str, after: str) -> None:
    assert before in CODE
    changed = source(CODE.replace(before, after))
    assert changed.digest == source(CODE).digest
    assert source(CODE).difference(changed, ("then", "now")) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x * 2", "x * 2.0"),
        ("0.1", "0.2"),
        ("x * 2", "2 * x"),
        ("import torch\n", "import torch, os\n"),
        ("class Mine", "class Yours"),
        ("def loss(self, x)", "async def loss(self, x)"),
        ("def loss(self, x)", "def loss(self, x=None)"),
    ],
)
def test_code_counts_and_the_difference_shows_it(before: str, after: str) -> None:
    changed = source(CODE.replace(before, after))
    assert changed.digest != source(CODE).digest
    told = source(CODE).difference(changed, ("kept in runs/a", "now"))
    assert told[:2] == ["--- task.py (kept in runs/a)", "+++ task.py (now)"]
    (removed,) = [line for line in told[2:] if line.startswith("-")]
    (added,) = [line for line in told[2:] if line.startswith("+")]
    assert (before.strip() in removed, after.strip() in added) == (True, True)
    assert all(line.strip() for line in told), "a blank line would end the message"


def test_docstrings_count_where_any_of_the_files_reads_them() -> None:
    reading = "print(Mine.__doc__)"
    changed = CODE.replace("A task.", "Another task.")
    assert source(CODE, other=reading).digest != source(changed, other=reading).digest
    assert source(CODE, other="").digest == source(changed, other="").digest


def test_a_statement_that_is_only_a_text_in_the_middle_is_no_docstring() -> None:
    assert source("x = 1\n'a'\n").digest == source("x = 1\n'a'\n").digest
    assert source("x = 1\n'a'\n").digest != source("x = 1\n'b'\n").digest


def test_files_that_are_added_removed_or_renamed_count_but_the_tasks_own_name_does_not() -> None:
    alone, two = source(CODE), source(CODE, nets="x = 1\n")
    assert two.digest != alone.digest
    assert two.digest != source(CODE, models="x = 1\n").digest
    renamed = source(CODE, name="digits.py")
    assert renamed.digest == alone.digest
    assert alone.difference(renamed, ("then", "now")) == []
    assert two.difference(alone, ("then", "now"))[:2] == ["--- nets.py (then)", "+++ nets.py (now)"]
    changed = source(CODE.replace("x * 2", "x * 3"), name="digits.py")
    assert alone.difference(changed, ("then", "now"))[:2] == ["--- task.py (then)", "+++ digits.py (now)"]


def test_a_long_difference_is_cut() -> None:
    other = source("".join(f"x{i} = {i}\n" for i in range(50)))
    told = source(CODE).difference(other, ("then", "now"), 20)
    assert len(told) == 21
    assert told[-1].startswith("… and ")


def test_what_is_not_python_is_compared_as_text() -> None:
    assert source("def (").digest != source("def ( ").digest
    assert source("def (").digest == source("def (").digest


def test_it_comes_back_from_json_as_it_was_also_where_it_is_not_utf_8() -> None:
    latin = TaskSource("task.py", {"task.py": b"# coding: latin-1\nx = '\xe4'\n", "a/b.py": b""})
    assert TaskSource.from_json(latin.to_json()) == latin


@pytest.mark.parametrize("name", ["/etc/x.py", "../x.py", "a/../../x.py", "x.sh", "", "a\n.py"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    text = TaskSource("task.py", {"task.py": b"", name: b""}).to_json()
    with pytest.raises(ValueError, match="is no name of a file in it"):
        TaskSource.from_json(text)


@pytest.mark.parametrize("helper", ["between.py", "a.py", "z.py"])
def test_a_renamed_task_has_the_same_digest_wherever_its_name_lies_among_the_others(helper: str) -> None:
    """By their real names, `between.py` comes after `alpha.py` and before `task.py`."""
    before, after = (TaskSource(main, {main: CODE.encode(), helper: b"x = 1\n"}) for main in ("alpha.py", "task.py"))
    assert before.digest == after.digest
    assert before.difference(after, ("then", "now")) == []
