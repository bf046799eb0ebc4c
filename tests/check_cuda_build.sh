#!/usr/bin/env bash
# Builds the package with its CUDA kernels and NCCL against CUDA builds of torch, imports it and runs some CPU tests.
# The machine needs nvcc but no GPU.
# Usage: tests/check_cuda_build.sh PYTHON REQUIREMENT...
# FOLDER (default: build/check-cuda) keeps an environment of about 6 GB per torch. ARCHS (default: 90) lists the
# architectures in CMake's spelling. A failure with one torch does not skip the others.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
folder=$(realpath -m "${FOLDER:-build/check-cuda}")
archs=${ARCHS:-90}
command -v nvcc > /dev/null || { echo "check-cuda-build: PATH has no nvcc, which the build needs; install the CUDA toolkit." >&2; exit 1; }

# Runs outside of the checkout, so that Python imports the installed package.
say_what_was_built='
import sys, torch
from drivetrain import _C, _build_info as built
print(f"torch {torch.__version__} (CUDA {torch.version.cuda}), kernels by nvcc {built.CUDA}, NCCL {built.NCCL}")
if torch.version.cuda is None:
    sys.exit("torch is a CPU build; expected a CUDA build")
if not _C.has_cuda() or built.CUDA == "none" or built.NCCL == "none":
    sys.exit("the package was built without its CUDA kernels or without NCCL")
if torch.cuda.is_initialized():
    sys.exit("the import has initialized CUDA; expected it not to")
'

check() { # requirement
  local env="$folder/${1//[^a-zA-Z0-9.]/-}"
  local begin=$SECONDS
  step() { # what, command...
    local what=$1 start=$SECONDS
    shift
    if "$@" > "$env.log" 2>&1; then
      echo "  $what: $((SECONDS - start)) s"
    else
      echo "  $what: FAILED after $((SECONDS - start)) s" && tail -n 40 "$env.log"
      return 1
    fi
  }
  in_env() { (cd "$env" && OMP_WAIT_POLICY=passive "$env/bin/python" "$@"); }
  echo "== $1"
  mkdir -p "$folder"
  step "environment" "$python" -m venv "$env" &&
    step "torch" "$env/bin/python" -m pip install "$1" numpy &&
    step "tools" "$env/bin/python" -m pip install "scikit-build-core>=0.10" "pybind11>=3.0" "cmake>=3.25" ninja "rich>=13" \
      "pytest>=8" "hypothesis>=6" &&
    step "build for $archs" "$env/bin/python" -m pip install --no-build-isolation --no-deps --force-reinstall \
      --config-settings=build-dir="$env/build" --config-settings=cmake.define.DRIVETRAIN_CUDA=on "--config-settings=cmake.define.DRIVETRAIN_CUDA_ARCHITECTURES=$archs" . &&
    step "import" in_env -c "$say_what_was_built" && cat "$env.log" &&
    step "doctor" in_env -m drivetrain doctor &&
    step "tests" in_env -m pytest -q -c "$PWD/pyproject.toml" --rootdir "$PWD" "$PWD"/tests/{optim/test_optim,ddp/test_bucket_planner,package/test_stub,grad/test_main_grads,grad/test_fuse_wgrad,recompute/test_checkpoint,budget/test_{bits,errors,hooks,memory,out_of_memory,plans,profile,threads}}.py &&
    tail -n 1 "$env.log" || return 1
  echo "  all: $((SECONDS - begin)) s"
}

failed=()
for requirement in "$@"; do
  check "$requirement" || failed+=("$requirement")
done
[ ${#failed[@]} -eq 0 ] || { echo "check-cuda-build: failed for ${failed[*]}" >&2; exit 1; }
