#!/usr/bin/env bash
# Write requirements.lock: the versions that an environment with every extra of pyproject.toml (but `bench` and `stores`) and the
# build backend holds; and tools/locks, those of the environments beside it that there are.
# Run it in that environment, after the tests passed there: bash tools/lock.sh [.venv/bin/python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}

frozen() { # local versions (2.13.0+cpu) are left out: they name a build that another index may not have
    echo "# Written by tools/lock.sh with $("$1" -V). The versions that the tests passed with; pyproject.toml says what is allowed."
    "$1" -m pip --disable-pip-version-check freeze --local --exclude-editable --exclude plait | sed -E 's/\+[A-Za-z0-9.]+$//'
}

frozen "$python" >requirements.lock
for lock in tools/locks/*.lock; do
    beside=build/$(basename "$lock" .lock)/bin/python
    [[ ! -x $beside ]] || frozen "$beside" >"$lock"
done
