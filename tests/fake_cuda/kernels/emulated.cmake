# Builds the CUDA kernels as C++ for DRIVETRAIN_CUDA=emulated. A launch enqueues work on a stream of tests/fake_cuda.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import glob, os, nvidia; print(*(f for p in nvidia.__path__ for f in sorted(glob.glob(os.path.join(p, '*', 'include', 'cuda_runtime_api.h')))), sep=';')"
  OUTPUT_VARIABLE cuda_runtime_headers OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT cuda_runtime_headers)
  message(FATAL_ERROR "DRIVETRAIN_CUDA=emulated needs the headers and the library that a CUDA 13 build of torch brings, and found none: run \"pip install torch===2.11.0\".")
endif()
list(GET cuda_runtime_headers 0 cuda_runtime_header)
get_filename_component(cuda_include_dir "${cuda_runtime_header}" DIRECTORY)
get_filename_component(cuda_package_dir "${cuda_include_dir}" DIRECTORY)
# The stand-in has the same soname and is preloaded, so the module's calls reach it and not this library.
file(GLOB cuda_runtime_library "${cuda_package_dir}/lib/libcudart.so.*")

set(fake_cuda_dir "${CMAKE_CURRENT_LIST_DIR}/..")
set(cuda_on_cpu_dir "${CMAKE_CURRENT_LIST_DIR}/../../native/cuda_on_cpu")
include("${cuda_on_cpu_dir}/options.cmake")
set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${cuda_on_cpu_options}")
add_library(kernels_cuda OBJECT ${cuda_sources})
target_include_directories(kernels_cuda BEFORE PRIVATE "${CMAKE_CURRENT_LIST_DIR}")
target_include_directories(kernels_cuda PRIVATE csrc "${cuda_on_cpu_dir}" "${fake_cuda_dir}")
# The thread sanitizer's instrumentation passes each access to accesses.cpp. The sanitizer's own library is not linked.
target_compile_options(kernels_cuda PRIVATE -O1 -g1 -ffp-contract=off -fno-math-errno
  -fsanitize=thread --param=tsan-instrument-func-entry-exit=0)

add_library(kernels_emulator OBJECT "${cuda_on_cpu_dir}/cuda_runtime.cpp" "${CMAKE_CURRENT_LIST_DIR}/launch.cpp"
  "${CMAKE_CURRENT_LIST_DIR}/accesses.cpp")
target_include_directories(kernels_emulator BEFORE PRIVATE "${CMAKE_CURRENT_LIST_DIR}")
target_include_directories(kernels_emulator PRIVATE "${cuda_on_cpu_dir}" "${fake_cuda_dir}")
target_compile_options(kernels_emulator PRIVATE -O2 -g1)
list(APPEND kernels $<TARGET_OBJECTS:kernels_cuda> $<TARGET_OBJECTS:kernels_emulator>)

add_library(fake_cuda_kernels INTERFACE)
target_include_directories(fake_cuda_kernels SYSTEM INTERFACE "${fake_cuda_dir}/include" "${cuda_include_dir}")
target_link_options(fake_cuda_kernels INTERFACE ${cuda_on_cpu_link_options})
target_link_libraries(fake_cuda_kernels INTERFACE "${cuda_runtime_library}" ${CMAKE_DL_LIBS})
set(DRIVETRAIN_CUDA_BUILT "emulated on the CPU")
