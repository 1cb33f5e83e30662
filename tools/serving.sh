#!/usr/bin/env bash
# The tests of `plait serve` with FastAPI, uvicorn and OpenAI's client, which .venv does not have: in an environment that sees .venv's too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
shift || true
beside=${SERVING:-build/serving}

if ! "$beside/bin/python" -c 'import fastapi, openai, uvicorn' 2>/dev/null; then
    rm -rf "$beside"
    "$python" -m venv "$beside"
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$beside/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/plait.pth"
    "$beside/bin/python" -m pip install --disable-pip-version-check --no-input -qq ${PIP_ARGS:-} "fastapi>=0.115" "uvicorn>=0.32" openai
fi
PYTHONPATH=src OMP_NUM_THREADS=1 exec "$beside/bin/python" -m pytest tests/integration/test_serve.py "$@"
