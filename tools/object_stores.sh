#!/usr/bin/env bash
# The tests of object stores with s3fs and moto, which .venv does not have: in an environment that sees the packages of .venv too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
shift || true
beside=build/object-stores

if ! "$beside/bin/python" -c 'import moto.server, s3fs' 2>/dev/null; then
    rm -rf "$beside"
    "$python" -m venv "$beside"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$beside/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/plait.pth"
    "$beside/bin/python" -m pip install --disable-pip-version-check --no-input -qq ${PIP_ARGS:-} "s3fs>=2024.2" "moto[s3]>=5" flask flask-cors
fi
PYTHONPATH=src OMP_NUM_THREADS=1 exec "$beside/bin/python" -m pytest tests/parity/test_object_store.py "$@"
