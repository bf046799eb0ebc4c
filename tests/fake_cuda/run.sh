#!/usr/bin/env bash
# Builds the stand-in and the package for it, and runs the GPU tests on them. See README.md.
# Usage: run.sh PYTHON [--build | --python arguments | pytest arguments]
# --build only installs torch and the tools, and builds, which CI does while it tests the package. --python runs a script.
# PART=ci runs only the tests in ci_part.txt and the stand-in's own. SEEDS (default: "1 2 3") lists the seeds of stream
# delays and orders; each seed is one run.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
shift
folder=$PWD/build/fake_cuda
mkdir -p "$folder"

# Uses the given Python if it has a CUDA build of torch, otherwise an environment of the repository that installs one.
# `===` is needed because a registry may offer a CPU build under the same number.
has_torch() { "$1" -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '2.11.0' or not torch.version.cuda)" 2> /dev/null; }
if ! has_torch "$python"; then
  own=$PWD/.venv-fake-cuda
  [ -x "$own/bin/python" ] || "$python" -m venv "$own"
  python=$own/bin/python
  has_torch "$python" || "$python" -m pip install --quiet "torch===2.11.0" numpy
  "$python" -m pip install --quiet "scikit-build-core>=0.10" "pybind11>=3.0" "cmake>=3.25" ninja "rich>=13" \
    "pytest>=8" "pytest-xdist>=3.6" "hypothesis>=6" "expecttest>=0.2"
fi

# Adds an environment over that Python's packages, so that the module for the stand-in replaces no module for a GPU.
layer=$folder/env
if [ ! -x "$layer/bin/python" ]; then
  "$python" -m venv "$layer"
  "$python" -c "import site, sys; print(*[p for p in sys.path if p.endswith('site-packages')], sep='\n')" \
    > "$("$layer/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
fi
PATH=$(dirname "$python"):$PATH
export PATH
cmake -S tests/fake_cuda -B "$folder" -G Ninja -DPython_EXECUTABLE="$layer/bin/python" > "$folder/cmake.log" || { cat "$folder/cmake.log"; exit 1; }
cmake --build "$folder"
"$layer/bin/python" -m pip install --quiet --no-build-isolation --no-deps --editable . \
  --config-settings=build-dir=build/fake_cuda_module --config-settings=install.strip=false --config-settings=cmake.define.DRIVETRAIN_CUDA=emulated
[ "${1:-}" != --build ] || exit 0

export LD_PRELOAD="$folder/libcudart.so.13 $folder/libcuda.so.1 $folder/libnccl.so.2" PYTHONPATH="$PWD/tests/fake_cuda:$PWD/benchmarks" FAKE_CUDA_ON_ERROR=record
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [ "${1:-}" = --python ]; then
  shift
  exec "$layer/bin/python" "$@"
fi
if [ $# -gt 0 ]; then
  exec "$layer/bin/python" -m pytest -p fake_cuda_plugin "$@"
fi
files=(tests --ignore tests/docs/test_notebooks.py) # needs Jupyter and has no test marked gpu
if [ "${PART:-}" = ci ]; then
  mapfile -t files < <(grep -v '^#' tests/fake_cuda/ci_part.txt)
fi
status=0
for seed in ${SEEDS:-1 2 3}; do
  echo "== the stand-in's own tests, and tests marked gpu, seed $seed"
  FAKE_CUDA_SEED=$seed "$layer/bin/python" -m pytest -p fake_cuda_plugin --numprocesses 2 --dist loadfile --quiet \
    --max-worker-restart 0 -m "gpu or fake_cuda" tests/fake_cuda "${files[@]}" || status=1
done
exit $status
