#!/bin/sh
# What `make test-services` needs: an environment with every extra, and the programs that are no Python packages.
# It may be run again at any time: what is there already is left as it is.
set -eu
cd -P "$(dirname "$0")/.."
python=.venv-services/bin/python
# One whose interpreter is gone, or that was copied from elsewhere and would still install there, is made anew.
if ! [ "$($python -c 'import sys; print(sys.prefix)' 2>/dev/null)" = "$PWD/.venv-services" ]; then
    rm -rf .venv-services
    "${PYTHON:-python3}" -m venv .venv-services
fi
echo "Installing what the services need into .venv-services (the first time takes some minutes) ..."
pip() { $python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
pip setuptools
pip --no-build-isolation --editable '.[dev,examples,services]'

packages=""
# Of each package a program that comes with it; promtool comes with prometheus.
for each in promtool:prometheus prometheus-alertmanager:prometheus-alertmanager chromium:chromium \
    redis-server:redis-server; do
    command -v "${each%%:*}" >/dev/null 2>&1 || packages="$packages ${each#*:}"
done
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "Please install$packages: this machine has no apt-get. Tests that need them fail until then." >&2
    exit 1
elif [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "Please install them as root: apt-get install$packages. Tests that need them fail until then." >&2
    exit 1
fi
# Their own daemons are not started (runlevel 1): tests start others, on ports of their own.
install() {
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get -qq install --no-install-recommends --yes $packages >/dev/null
}
# By the lists of packages that are there, if they do: a machine may have them and not the net to renew them.
install 2>/dev/null || { $as_root apt-get -qq update && install; }
