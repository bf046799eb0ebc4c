#!/usr/bin/env bash
# Writes a wheel and an sdist to dist/. It builds the wheel from the sdist as pip would. It runs the smoke test outside
# the checkout, in a fresh environment with torch and the wheel's requirements. Usage: tests/wheel.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
torch=$("$python" -c "from importlib.metadata import version; print(version('torch').split('+')[0])")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist

echo "== sdist"
"$python" -m pip install --quiet build
"$python" -m build --sdist --no-isolation --outdir "$work/sdist" . > "$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
echo "== wheel, from the sdist"
PATH=$(dirname "$(realpath --no-symlinks "$python")"):$PATH \
  "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/wheel" "$work"/sdist/*.tar.gz
echo "== smoke test in a fresh environment with torch $torch"
"$python" -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==$torch" numpy
"$work/env/bin/pip" install --quiet "$work"/wheel/*.whl
"$work/env/bin/pip" check
(cd "$work" && "$work/env/bin/python" "$OLDPWD/tests/wheel_smoke.py")
cp "$work"/sdist/*.tar.gz "$work"/wheel/*.whl dist/
ls -l dist
