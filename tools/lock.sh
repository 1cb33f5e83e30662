#!/usr/bin/env bash
# Write requirements.lock: the versions that an environment with every extra of pyproject.toml (but `bench`, `serve` and `stores`) and the build backend holds.
# Run it in that environment, after the tests passed there: bash tools/lock.sh [.venv/bin/python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
{
    echo "# Written by tools/lock.sh with $("$python" -V). The versions that the tests passed with; pyproject.toml says what is allowed."
    # A local version (2.13.0+cpu) names a build that another index may not have.
    "$python" -m pip --disable-pip-version-check freeze --exclude-editable --exclude plait | sed -E 's/\+[A-Za-z0-9.]+$//'
} >requirements.lock
