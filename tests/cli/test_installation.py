"""What a newcomer does first: `make demo` with whatever Python is there, and `pip install` of a wheel."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = """#!/bin/sh
case "$1" in
  --version) echo "Python 3.8.10" ;;
  -c) exec {python} -c 'import sys; sys.version_info = (3, 8, 10); exec(sys.argv[1])' "$2" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["demo", "test-services", "test-oldest-torch"])
def test_an_old_python_is_refused_before_anything_is_made(target: str, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        ["make", target, f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "Quorate needs Python 3.11 or newer" in done.stderr
    assert "is Python 3.8.10" in done.stderr
    assert f"make {target} PYTHON=python3.12" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_a_wheel_is_installed_in_an_empty_environment_and_trains_a_first_job_from_elsewhere(tmp_path: Path) -> None:
    """From a copy of the sources, into an environment of its own that borrows only what Quorate depends on."""
    source, wheels, place = tmp_path / "source", tmp_path / "wheels", tmp_path / "empty"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    alone = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    pip = [sys.executable, "-m", "pip"]
    _run([*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(wheels), str(source)], tmp_path)
    (wheel,) = wheels.glob("quorate-*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    _run([*pip, f"--python={python}", "install", *alone, str(wheel)], tmp_path)
    # Not by a .pth file: this checkout is installed by one there, and would come first.
    environment = {**os.environ, "PYTHONPATH": str(_dependencies(tmp_path))}
    place.mkdir()
    found = _run([str(python), "-c", "import quorate; print(quorate.__file__)"], place, environment)
    assert found.strip().startswith(str(tmp_path / "venv"))
    quorate = str(tmp_path / "venv" / "bin" / "quorate")
    _run([quorate, "init", str(tmp_path / "first")], place, environment)
    shown = _run([quorate, "train", str(tmp_path / "first" / "job.yaml"), "--steps", "4"], place, environment)
    assert "complete" in shown
    assert [run.name for run in (tmp_path / "first" / "runs").iterdir()] == ["first-0001"]
    assert not list(place.iterdir()), "nothing is left where it was typed"
    code = "from quorate.core.installation import install_of; print(install_of('ray'))"
    told = _run([str(python), "-c", code], place, environment).strip()
    assert told == f"pip install 'quorate[ray] @ {wheel.as_uri()}'"


def _dependencies(folder: Path) -> Path:
    """A folder with everything that is installed here but Quorate itself."""
    links = folder / "dependencies"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "quorate" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    return links


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
