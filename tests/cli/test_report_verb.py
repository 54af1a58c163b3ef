"""`quorate report`: where the page goes, and what is said of it."""

from pathlib import Path

from typer.testing import CliRunner

from command import Workplace
from quorate.cli.app import app
from schemas import validate


def test_a_page_is_written_where_it_is_asked_for(used_workplace: Workplace) -> None:
    done = used_workplace.run("report", "last", "--json")
    assert done.code == 0, done.stderr
    validate("report", done.document)
    page = Path(done.document["file"])
    assert page == used_workplace.folder / "tiny-0001.html"
    assert page.stat().st_size == done.document["bytes"]
    assert page.read_text().startswith("<!doctype html>")


def test_elsewhere(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(finished / "runs" / "tiny-0001"), "-o", str(page)])
    assert (done.exit_code, done.stdout.startswith(str(page))) == (0, True)
    assert "Where the time goes" in page.read_text()


def test_a_place_that_cannot_be_written(used_workplace: Workplace) -> None:
    done = used_workplace.run("report", "last", "-o", "nowhere/page.html")
    assert done.code == 2
    assert done.error.startswith("cannot write the report to nowhere/page.html: No such file or directory.")
