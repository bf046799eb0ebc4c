#!/usr/bin/env bash
# Runs the package's tests under the address and undefined-behavior sanitizers, and the torch-free native tests and those
# of the bindings under the thread sanitizer too. Usage: tests/sanitize.sh PYTHON [pytest arguments]. Each sanitizer takes
# a few minutes.
set -euo pipefail
python=$1
shift
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/optim/test_optim.py tests/optim/test_step_tail.py tests/ddp/test_ddp.py tests/ddp/test_ddp_contract.py
  tests/ddp/test_accumulate.py tests/grad/test_main_grads.py tests/grad/test_fuse_wgrad.py tests/optim/test_in_backward.py tests/recompute/test_checkpoint.py tests/budget/test_{bits,errors,hooks,memory,out_of_memory,plans,profile,threads}.py
  tests/saved_tensors/test_pack.py tests/saved_tensors/test_offload.py tests/ddp/test_shm.py tests/ddp/test_bucket_planner.py)
site=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")

WHOLE=1 "$python" -m pytest tests/package/test_native.py

declare -A runtime=([address]=libasan.so [undefined]=libubsan.so [thread]=libtsan.so)
for sanitizer in address undefined thread; do
  # The thread sanitizer sees Python's lock, but not how torch's own threads wait for each other.
  [ $sanitizer != thread ] || tests=(tests/package/test_bindings.py)
  folder=build/sanitize-$sanitizer
  rm -rf "$folder/site"
  echo "== building with -fsanitize=$sanitizer"
  "$python" -m pip install --quiet --no-build-isolation --no-deps --target "$folder/site" \
    --config-settings=build-dir="$folder/build" --config-settings=cmake.define.DRIVETRAIN_SANITIZE=$sanitizer --config-settings=cmake.define.DRIVETRAIN_CUDA=off .
  echo "== testing with -fsanitize=$sanitizer"
  # -S skips the site module, so that an editable install in the environment does not precede this build.
  # Leaks of Python and torch are not checked. Python links neither the sanitizer's runtime nor libstdc++, so both are
  # preloaded: without libstdc++ the runtime could not forward a thrown exception.
  run() {
    LD_PRELOAD="$(g++ -print-file-name="${runtime[$sanitizer]}") $(g++ -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=exitcode=66:suppressions=$PWD/tests/thread_sanitizer.txt \
    PYTHONPATH="$folder/site:$site" "$python" -S -m pytest "$@"
  }
  run "${tests[@]}"
  # 10,000 edits of states, groups and parameters, each with a step after it: no step may use memory that was freed.
  [ $sanitizer != address ] || WHOLE=1 run tests/optim/test_random_scripts.py -k edits
done
