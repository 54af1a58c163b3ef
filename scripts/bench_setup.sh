#!/bin/sh
# Installs the peers that `python -m benchmarks` compares with into .venv-bench. They stay out of .venv, since what comes with
# them would change what the tests run with (one of their packages brings a pytest plugin, for instance). .venv-bench
# sees the packages of .venv behind its own, so that Quorate and its peers compute with the same torch, file for file.
set -eu
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
    echo "There is no .venv yet: call \`make bench-setup\`, which makes it first." >&2
    exit 2
fi
.venv/bin/python -m venv .venv-bench
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" > "$(.venv-bench/bin/python -c "$packages")/packages-of-quorate.pth"
.venv/bin/python -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["bench"], sep="\n")
' | .venv-bench/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement /dev/stdin

if ! command -v mpirun > /dev/null; then
    echo "OpenMPI is not installed, so it will not be measured. On Debian and Ubuntu: apt install openmpi-bin"
fi
PATH="$PATH:/usr/sbin:/sbin"
if ! command -v ip > /dev/null || ! command -v tc > /dev/null; then
    echo "ip and tc are not installed, so overlap will not be measured. On Debian and Ubuntu: apt install iproute2"
fi
