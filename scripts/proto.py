"""Makes the Python stubs of `coordinator.proto`, or checks that they are current.

::

    python scripts/proto.py             write them
    python scripts/proto.py --check     exit with 1 when they differ from what would be written
"""

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
PROTO = Path("quorate/wire/proto/coordinator.proto")
STUBS = tuple(PROTO.with_name(f"{PROTO.stem}{ending}") for ending in ("_pb2.py", "_pb2.pyi"))


def generate(target: Path) -> None:
    """Write the stubs below `target`, at the path of their package: the generated imports are absolute."""
    # Imported here, so that `--help` works where only the run-time dependencies are installed.
    from grpc_tools import protoc  # type: ignore[import-untyped]

    builtin = resources.files("grpc_tools") / "_proto"
    kinds = ("python_out", "pyi_out")
    outputs = [f"--{kind}={target}" for kind in kinds]
    code = protoc.main(["protoc", f"-I{SOURCE}", f"-I{builtin}", *outputs, str(PROTO)])
    if code != 0:
        raise SystemExit(f"protoc refused {PROTO} (exit code {code})")


def stale_stubs() -> list[Path]:
    """The stubs that differ from what would be written now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return [stub for stub in STUBS if _content(SOURCE / stub) != _content(Path(folder) / stub)]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description="Make the Python stubs of coordinator.proto.")
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    if not parser.parse_args().check:
        generate(SOURCE)
        return 0
    stale = stale_stubs()
    for stub in stale:
        print(f"{stub} is not current; run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
