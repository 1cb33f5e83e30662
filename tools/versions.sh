#!/usr/bin/env bash
# Every technique on each torch that pyproject.toml allows, and on those beside it, in environments of their own: tools/versions.sh [TORCH ...]
# Results go to benchmarks/results/versions/ and docs/versions.md. Environments are kept in $VERSIONS (default build/versions). PYTHON chooses
# their interpreter, PIP_ARGS are pip's. Without a GPU, PyTorch's own index gives builds without CUDA; where it cannot be reached, PyPI's take
# some GB each.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${VERSIONS:-build/versions}
mkdir -p "$folder"
[[ $# -gt 0 ]] || set -- 2.13.0 2.14.1 2.15.0
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
    PYTHONPATH=src OMP_NUM_THREADS=1 "$python" -W ignore tools/version_cover.py || failed+=("$version: see docs/versions.md")
    PYTHONPATH=src "$python" tools/version_cover.py --page
done
((${#failed[@]} == 0)) || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
