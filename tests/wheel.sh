#!/usr/bin/env bash
# Writes an sdist and a wheel to dist/. It builds the wheel from the sdist, which has no git. It installs the wheel without
# an index and without a compiler, into a fresh environment with torch, and runs the smoke test there, outside of the
# checkout. Usage: tests/wheel.sh PYTHON [ARGUMENT OF tools/wheel.py]...
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
source=build/wheels/sdist # not below $work: a build knows its folder, and repeats what has changed
rm -rf "$source"
mkdir -p "$source"
tar -xzf dist/*.tar.gz -C "$source" --strip-components 1
"$python" tools/wheel.py --source "$source" "$@"
echo "== smoke test in a fresh environment with torch $torch"
"$python" -m venv "$work/env"
"$work/env/bin/pip" install --quiet "torch==$torch" numpy rich
begin=$(date +%s)
PATH="$work/env/bin" CXX=/nonexistent "$work/env/bin/pip" install --quiet --no-index --find-links dist drivetrain
(cd "$work" && PATH="$work/env/bin" "$work/env/bin/drivetrain" doctor)
echo "installed and checked in $(($(date +%s) - begin)) s"
"$work/env/bin/pip" check
smoke=$PWD/tests/wheel_smoke.py
(cd "$work" && "$work/env/bin/python" "$smoke")
ls -l dist
