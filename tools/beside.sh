#!/usr/bin/env bash
# Run a command with packages that .venv does not have, in the environment build/NAME: it sees .venv's packages too, and holds
# tools/locks/NAME.lock.   bash tools/beside.sh NAME .venv/bin/python ARGUMENTS OF PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=$1 python=$2
shift 2
lock=tools/locks/$name.lock beside=build/$name

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if ! cmp -s "$lock" "$beside/.complete" || ! "$beside/bin/python" -c '' 2>/dev/null; then
    rm -rf "$beside"
    "$python" -m venv "$beside"
    packages "$python" >"$(packages "$beside/bin/python")/plait.pth"
    "$beside/bin/python" -m pip install --disable-pip-version-check --no-input -qq ${PIP_ARGS:-} -r "$lock"
    cp "$lock" "$beside/.complete"
fi
PYTHONPATH=$PWD/src OMP_NUM_THREADS=1 exec "$beside/bin/python" "$@"
