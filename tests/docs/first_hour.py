"""A newcomer's first hour, as the README tells it: its blocks, in order, as one script.

By hand, with everything installed anew: ``python tests/docs/first_hour.py FOLDER``
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADING = "Your own model, in five minutes"
ADDRESS = "ADDRESS"
INSTALL = "make setup"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """Commands to type, or a file to write: one whose first line is a comment with its name."""

    text: str
    file: str | None = None

    def as_script(self) -> str:
        """What a shell does with it."""
        return self.text if self.file is None else f"cat > {self.file} <<'END OF FILE'\n{self.text}END OF FILE\n"


def blocks_of(page: str) -> list[Block]:
    """What a page tells its reader to type and to write, in order."""
    section = page.split(f"\n## {HEADING}\n")[1].split("\n## ")[0]
    blocks = []
    for language, text in _BLOCK.findall(section):
        name = _FILE.match(text)
        assert language == "sh" or name, f"nothing says what to do with this block:\n{text}"
        blocks.append(Block(text) if language == "sh" else Block(text, name and name[1]))
    return blocks


def script_of(page: str, address: Path, before_install: str = "") -> str:
    """All of it as one script; whatever fails in it ends it."""
    text = "set -eu\n" + "".join(block.as_script() for block in blocks_of(page))
    assert f"git clone {ADDRESS}" in text
    assert f"\n{INSTALL}" in text
    return text.replace(ADDRESS, str(address)).replace(f"\n{INSTALL}", f"\n{before_install}\n{INSTALL}")


def publish(folder: Path) -> Path:
    """A repository that holds the working tree as it is now, to be cloned."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = _git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed, but still listed
            shutil.copy2(ROOT / name, folder / name)
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    _git(folder, "commit", "--quiet", "--message", "The working tree")
    return folder


def reuse_environment(clone: Path) -> None:
    """Give a clone an environment that has everything installed already, and nothing to install with."""
    folder = clone / ".venv"
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    packages.joinpath("reused.pth").write_text(f"{clone / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
    _write_program(folder / "bin" / "quorate", f"#!{folder}/bin/python\nfrom quorate.cli.main import run\n\nrun()\n")
    _write_program(folder / "bin" / "pip", "#!/bin/sh\necho 'pip is called although all is installed' >&2\nexit 1\n")
    now = time.time_ns()
    for stamp in re.findall(r"^\.venv/(\.stamp-[a-z]+):", (clone / "Makefile").read_text(), re.MULTILINE):
        (folder / stamp).touch()
        os.utime(folder / stamp, ns=(now, now))  # all of one age: to make, none is older than what it depends on


def newcomers_environment() -> dict[str, str]:
    """The environment without what leads Python to the code that is tested here."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(script: str, folder: Path, within: float) -> str:
    """Run the script in a folder, as a newcomer's shell does; what it printed."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=newcomers_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _git(folder: Path, *arguments: str) -> str:
    settings = {"user.name": "First Hour", "user.email": "first.hour@example.org", "commit.gpgSign": "false"}
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    # Git sets these for the hooks that it calls, and they would lead it to the wrong repository.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *options, *arguments], cwd=folder, env=inherited, capture_output=True, text=True, check=True
    )
    return done.stdout


def main(*arguments: str) -> None:
    """Do all of it in a folder; with ``--reuse`` only give a clone its environment."""
    place = Path(arguments[-1]).absolute()
    if arguments[0] == "--reuse":
        reuse_environment(place)
    else:
        script = script_of((ROOT / "README.md").read_text(), publish(place / "origin"))
        print(run(script, place, within=900))


if __name__ == "__main__":
    main(*sys.argv[1:])
