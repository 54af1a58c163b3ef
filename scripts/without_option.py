"""Test the core without an option: the package without its folder and its line in the table of options.

::

    python scripts/without_option.py                          # each option in turn
    python scripts/without_option.py servers -- -n 3          # one of them; what follows -- is for pytest
    python scripts/without_option.py --together               # all of them at once

The exit code is 1 if a test of the core fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path("src/quorate/spec/options.py")
SELECTED = "not long and not services"


def main() -> int:
    """Test without each option that is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("option", nargs="*", help="its name, such as servers; by default all")
    parser.add_argument("--together", action="store_true", help="leave them out at once, not in turn")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, for_pytest = sys.argv[1:at], sys.argv[at + 1 :]
    rooms = rooms_of_options()
    arguments = parser.parse_args(own)
    wanted = arguments.option or list(rooms)
    if unknown := [option for option in wanted if option not in rooms]:
        parser.error(f"no option {', '.join(unknown)}: there are {', '.join(rooms)}")
    trials = [wanted] if arguments.together else [[option] for option in wanted]
    failed = [
        " and ".join(trial)
        for trial in trials
        if not passes_without([rooms[option] for option in trial], for_pytest or ["-n", "3", "-q"])
    ]
    print("failed without:", ", ".join(failed) or "none")
    return 1 if failed else 0


def rooms_of_options() -> dict[str, str]:
    """The room of each option by its name, such as `quorate.strategies.servers` of servers."""
    sys.path.insert(0, str(ROOT / "tests"))
    from options import ROOMS

    folders = {option: prefixes[0].rstrip(".") for option, prefixes in ROOMS.items()}
    return {option: room for option, room in folders.items() if (ROOT / "src" / room.replace(".", "/")).is_dir()}


def passes_without(rooms: list[str], for_pytest: list[str]) -> bool:
    """Whether the tests of the core pass in a copy of this work tree that has no such rooms."""
    with tempfile.TemporaryDirectory(prefix="quorate-without-") as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        for room in rooms:
            shutil.rmtree(tree / "src" / room.replace(".", "/"))
        table = tree / TABLE
        lines = table.read_text().splitlines(keepends=True)
        named = tuple(f'    "{room}":' for room in rooms)
        table.write_text("".join(line for line in lines if not line.startswith(named)))
        print(f"without {', '.join(rooms)}:", flush=True)
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        command = [sys.executable, "-m", "pytest", "--core", "-m", SELECTED, "-p", "no:cacheprovider", *for_pytest]
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode == 0


def _copy(tree: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


if __name__ == "__main__":
    sys.exit(main())
