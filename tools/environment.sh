#!/usr/bin/env bash
# Make $VENV hold exactly requirements.lock and this project (editable). Quick when it does already; starts over when it is broken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
stamp=$venv/.complete

wanted() { # what the environment was made from; the folder counts, because the installed project points to it
    { pwd; cat requirements.lock pyproject.toml tools/environment.sh; } | cksum
}

suitable() { # an interpreter of a version that Plait runs on, able to make an environment
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        suitable "$PYTHON" && { echo "$PYTHON"; return; }
        echo "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip." >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 && suitable "$candidate" && { echo "$candidate"; return; }
    done
    {
        echo "Plait needs Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip, and found none; python3 is: $(python3 -V 2>&1 || echo missing)."
        echo "Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: make PYTHON=/path/to/python3.11 ..."
    } >&2
    return 1
}

# PyPI's torch for Linux brings CUDA, some GB that a machine without a GPU has no use for. Where PyTorch's own index cannot be reached,
# the lock file's line takes what PyPI or the configured index has.
cpu_torch() {
    [[ $(uname -s) == Linux && ! -e /proc/driver/nvidia/version && -z ${PIP_ARGS:-} ]] || return 0
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps --retries 0 --timeout 15 \
        --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.lock)" >/dev/null 2>&1 || true
}

install() {
    cpu_torch
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -qq ${PIP_ARGS:-} -r requirements.lock &&
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -qq --no-deps --no-build-isolation -e .
}

fresh() {
    local python
    python=$(find_python)
    rm -rf "$venv"
    echo "Making $venv with $("$python" -V) ..."
    "$python" -m venv "$venv"
}

[[ -f $stamp && $(cat "$stamp") == "$(wanted)" ]] && "$venv/bin/python" -c '' 2>/dev/null && exit

rm -f "$stamp"
reused=yes
if ! { suitable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    fresh
    reused=no
fi
echo "Installing requirements.lock into $venv (the first time this downloads torch and takes minutes) ..."
if ! install; then
    [[ $reused == yes ]] || exit 1
    echo "That failed in the environment that was there; trying again with a fresh one." >&2
    fresh
    install
fi
wanted >"$stamp"
