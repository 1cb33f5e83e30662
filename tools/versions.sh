#!/usr/bin/env bash
# tools/versions.sh [TORCH ...] runs every technique on each release of torch that pyproject.toml
# allows, and the parity tests on the oldest and the newest. The results are written to
# benchmarks/results/versions and docs/development/versions.md.
#
# Each release has an environment of its own in $VERSIONS (default build/versions). PYTHON names the
# interpreter, PIP_ARGS are arguments of pip. Without a GPU, builds without CUDA are taken from
# PyTorch's index. Where that cannot be reached, PyPI's builds take some GB each.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${VERSIONS:-build/versions}
mkdir -p "$folder"
[[ $# -gt 0 ]] || set -- 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
failed=()

make_environment() { # folder, torch
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check --no-input -qq)
    rm -rf "$1"
    "${PYTHON:-python3}" -m venv "$1" || return 1
    if [[ $(uname -s) == Linux && ! -e /proc/driver/nvidia/version && -z ${PIP_ARGS:-} ]]; then
        "${pip[@]}" --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "torch==$2" >/dev/null 2>&1
    fi
    "${pip[@]}" ${PIP_ARGS:-} "torch==$2" -r <(grep -v '^torch==' requirements.lock)
}

for version; do
    python=$folder/$version/bin/python
    "$python" -c "import torch, pytest, transformers; assert torch.__version__.split('+')[0] == '$version'" 2>/dev/null ||
        make_environment "$folder/$version" "$version" || { failed+=("$version: not installed"); continue; }
    PYTHONPATH=src OMP_NUM_THREADS=1 "$python" -W ignore -m tools.version_cover || failed+=("$version: see docs/development/versions.md")
    case $version in
        2.11.0 | 2.15.0)
            PYTHONPATH=src OMP_NUM_THREADS=1 "$python" -m pytest -q tests/parity tests/fake \
                --junitxml="$folder/$version.xml"
            PYTHONPATH=src "$python" -m tools.version_cover --suite "$folder/$version.xml" ||
                failed+=("$version: tests failed, see docs/development/versions.md")
            ;;
    esac
    PYTHONPATH=src "$python" -m tools.version_cover --page
done
((${#failed[@]} == 0)) || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
