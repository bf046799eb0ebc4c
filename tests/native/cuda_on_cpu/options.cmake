# Sets the options that compile and link CUDA's sources over cuda_runtime.h.
# Calls are compared by the return addresses of their frames, so each call needs a frame, and one call must stay one.
set(cuda_on_cpu_options -x c++ -Wno-unknown-pragmas -fno-omit-frame-pointer -fno-thread-jumps -fno-optimize-sibling-calls)
set(cuda_on_cpu_link_options "-Wl,-T,${CMAKE_CURRENT_LIST_DIR}/shared_memory.ld")
