#!/usr/bin/env bash
# Builds the wheel of the Python package, installs it into a fresh virtual environment and runs its tests there.
#
#   scripts/check/python.sh            the package, its stubs, and the notebook of examples/python
#   scripts/check/python.sh --full     the same with 1,000 cycles of loading and freeing
#   scripts/check/python.sh --ray      larder.ray on a local cluster of three nodes
#   scripts/check/python.sh --keep DIR only makes DIR, a virtual environment with the package
#
# Needs Python from 3.9 on ($PYTHON or python3) with venv and pip, and the package index for what the tests import. Texts are compared
# with those of target/release/larder or $LARDER if there is one, else with the command of the package.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
package=$root/crates/larder-python
python=${PYTHON:-python3}
mode=${1:-}
case $mode in
"" | --full | --ray | --keep) ;;
*) echo "usage: scripts/check/python.sh [--full | --ray | --keep DIR]" >&2 && exit 2 ;;
esac

skip() {
    echo "skipped: $1"
    exit 0
}

command -v "$python" >/dev/null || skip "$python was not found"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || skip "$python is older than 3.9"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=$work/venv
[ "$mode" != --keep ] || venv=${2:?the folder to make}
"$python" -m venv "$venv" 2>/dev/null && [ -x "$venv/bin/pip" ] || skip "$python has no venv or no pip"
pip() { "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }

pip 'maturin>=1.9,<2' || skip "pip cannot install maturin"
start=$SECONDS
"$venv/bin/maturin" build --release --quiet --manifest-path "$package/Cargo.toml" --out "$work/wheels"
wheel=$(echo "$work"/wheels/larder-*.whl)
echo "$(basename "$wheel"): $(($(wc -c <"$wheel") / 1000000)) MB, built in $((SECONDS - start)) s"
start=$SECONDS
if [ "$mode" = --ray ]; then
    pip "$wheel[ray]" pytest requests
else
    pip "$wheel[lab]" pytest mypy pandas-stubs matplotlib nbclient nbformat ipykernel
fi
echo "installed in $((SECONDS - start)) s: $("$venv/bin/larder" --version)"
[ "$mode" != --keep ] || exit 0

# The tests are copied, so that they import the installed package and write nothing into the tree.
cp -r "$package/tests" "$work/tests"
cd "$work"
export PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0 LARDER_VISION=$root/tests/vision
LARDER=${LARDER:-$root/target/release/larder}
[ -x "$LARDER" ] && export LARDER || unset LARDER
start=$SECONDS
case $mode in
--ray) "$venv/bin/python" -m pytest -q -rs -s tests/ray ;;
--full) LARDER_CYCLES=1000 LARDER_NOTEBOOK=$root/examples/python/lambda_sweep.ipynb "$venv/bin/python" -m pytest -q -rs -s --ignore tests/ray tests ;;
*) LARDER_NOTEBOOK=$root/examples/python/lambda_sweep.ipynb "$venv/bin/python" -m pytest -q -rs -s --durations 5 --ignore tests/ray tests ;;
esac
echo "tested in $((SECONDS - start)) s"
