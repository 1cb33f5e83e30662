#!/usr/bin/env bash
# Run a set of tests with the lowest or the newest packages that pyproject.toml allows:
#
#   bash tools/packages.sh lowest
#   bash tools/packages.sh newest                         pre-releases included
#   bash tools/packages.sh newest transformers==5.20.0    the newest packages with one that is fixed
#
# The release of torch is that of requirements.lock, or $TORCH (`make versions` tests other releases). The
# environments are in $VERSIONS (default build/versions) and are made again by each run. PYTHON is their
# interpreter, PIP_ARGS are arguments for pip and uv. The numbers of tests are written to
# benchmarks/results/versions/packages.json and docs/development/versions-packages.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
set_name=${1:?lowest or newest}
shift
torch=torch==${TORCH:-$(sed -n 's/^torch==//p' requirements.lock)}
python_version=$("${PYTHON:-python3}" -c 'import platform; print(platform.python_version())')
row="$set_name${*:+, $*}"
case $set_name in
lowest) resolution=(--resolution lowest-direct) ;;
newest) resolution=(--prerelease allow) ;;
*) echo "tools/packages.sh takes lowest or newest, not $set_name" >&2; exit 2 ;;
esac
environment=${VERSIONS:-build/versions}/${row//[ ,=]/-}-python${python_version%.*}

rm -rf "$environment"
"${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --disable-pip-version-check --no-input -qq)
"${pip[@]}" ${PIP_ARGS:-} uv
printf '%s\n' "$torch" "$@" >"$environment/pins"
# shellcheck disable=SC2086
"$environment/bin/uv" pip compile -q --no-header --no-annotate ${PIP_ARGS:-} "${resolution[@]}" --constraint "$environment/pins" \
    --extra hf --extra peft --extra trl --extra viz --python "$environment/bin/python" pyproject.toml -o "$environment/resolved"
if [[ $(uname -s) == Linux && ! -e /proc/driver/nvidia/version && -z ${PIP_ARGS:-} ]]; then
    # The build on PyPI needs several GB of CUDA libraries. It is installed below only if PyTorch's index
    # cannot be reached.
    "${pip[@]}" --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$torch" >/dev/null 2>&1 || true
fi
"${pip[@]}" ${PIP_ARGS:-} --no-deps "$torch"
# A build of torch without CUDA needs no CUDA libraries.
if "$environment/bin/python" -c 'import importlib.metadata as m; assert "+cpu" in m.version("torch")' 2>/dev/null; then
    sed -i -E '/^(nvidia|cuda|triton)/d' "$environment/resolved"
fi
# Packages that only the tests use are installed without bounds.
"${pip[@]}" ${PIP_ARGS:-} -r "$environment/resolved" pytest pytest-timeout hypothesis psutil

tests() { # name of the result, arguments of pytest
    local result=$environment/$1.xml
    shift
    PYTHONPATH=src OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -q --junitxml="$result" "$@"
}
failed=0
tests models tests/unit/{model,inference,config,cli,checkpoint} tests/integration/test_quickstart.py || failed=1
tests trainer tests/unit/hf tests/parity/test_trainer.py tests/parity/test_adapters.py || failed=1
# Importing TRL takes ten seconds, so its tests are marked as proof.
tests trl -m "proof or not proof" tests/parity/test_sft.py tests/parity/test_dpo.py || failed=1
PYTHONPATH=src "$environment/bin/python" -m tools.package_versions "$row" "$environment"/*.xml
exit $failed
