#!/bin/sh
# What `make test-services` needs: an environment with every extra, and the programs that are no Python packages.
set -eu
cd "$(dirname "$0")/.."
echo "Installing the services into .venv-services (the first time takes some minutes) ..."
[ -x .venv-services/bin/pip ] || "${PYTHON:-python3}" -m venv .venv-services
pip() { .venv-services/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
pip setuptools
pip --no-build-isolation --editable '.[dev,examples,services]'

missing() { ! command -v "$1" >/dev/null 2>&1; }
packages=""
missing prometheus && packages="$packages prometheus"
missing prometheus-alertmanager && packages="$packages prometheus-alertmanager"
missing chromium && packages="$packages chromium"
if [ -n "$packages" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "Please install$packages: not being root, this script cannot. Tests that need them fail until then." >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    # Their own daemons are not started (runlevel 1): tests start others, on ports of their own.
    # shellcheck disable=SC2086
    RUNLEVEL=1 apt-get -qq install --no-install-recommends --yes $packages >/dev/null
fi
