# Lists the instruction sets that CPU kernels are compiled for, the weakest first, and the compiler's options for each.
# base/isa_namespace.h and base/cpu_isa.cpp name the same.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(instruction_sets baseline avx2 avx512)
  set(options_of_avx2 -mavx2 -mfma -mf16c)
  set(options_of_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(instruction_sets baseline armv8_2 sve)
  set(options_of_armv8_2 -march=armv8.2-a)
  set(options_of_sve -march=armv8.2-a+sve)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>) # the baseline has fused multiply-adds, and x86-64's has none
else()
  message(FATAL_ERROR "drivetrain supports Linux on x86-64 and aarch64, and this is ${CMAKE_SYSTEM_PROCESSOR}.")
endif()
