#!/usr/bin/env bash
# Writes an sdist and a wheel to dist/. It builds the wheel from the sdist, which has no git. Then it runs both blocks of
# README's "Install" in fresh environments: the first installs the wheel, with dist/ as the only index and without a
# compiler; the second builds from the checkout. Usage: tests/wheel.sh PYTHON [ARGUMENT OF tools/wheels.py]...
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
torch=$("$python" -c "from importlib.metadata import version; print(version('torch').split('+')[0])")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist
mkdir dist

echo "== sdist"
"$python" -m pip install --quiet build
"$python" -m build --sdist --no-isolation --outdir dist . > "$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
echo "== wheel, from the sdist"
source=build/wheels/sdist
rm -rf "$source"
mkdir -p "$source"
tar -xzf dist/*.tar.gz -C "$source" --strip-components 1
"$python" tools/wheels.py --source "$source" "$@"
block() { # number of a shell block of README's "Install"
  awk -v wanted="$1" '/^## /{on = /^## Install/} /^```/{inside = 0} inside && count == wanted; on && /^```bash/{count++; inside = 1}' README.md
}
echo "== README: from the index, with torch $torch"
"$python" -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==$torch" numpy rich
begin=$(date +%s)
PATH="$work/env/bin" CXX=/nonexistent PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/dist" /bin/bash -ec "$(block 1)"
echo "installed and checked in $(($(date +%s) - begin)) s"
"$work/env/bin/pip" check
smoke=$PWD/tests/wheel_smoke.py
(cd "$work" && "$work/env/bin/python" "$smoke")
echo "== README: from a checkout"
"$python" -m venv "$work/checkout"
VIRTUAL_ENV="$work/checkout" PATH="$work/checkout/bin:$PATH" /bin/bash -ec "$(block 2)"
ls -l dist
