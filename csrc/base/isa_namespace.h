// Gives inline functions a namespace per instruction set in files that are compiled once for each. Otherwise the linker
// may keep the AVX-512 copy of a function for all of them.
#pragma once

#if defined(DRIVETRAIN_ISA)
#define DT_BEGIN_ISA inline namespace DRIVETRAIN_ISA {
#define DT_END_ISA }
#else
#define DT_BEGIN_ISA
#define DT_END_ISA
#endif

// The instruction sets above the baseline, as in instruction_sets.cmake and cpu_isa.cpp.
#if defined(__aarch64__)
#define DT_SECOND_ISA armv8_2
#define DT_THIRD_ISA sve
#else
#define DT_SECOND_ISA avx2
#define DT_THIRD_ISA avx512
#endif

// Declares a function that a file defines once per instruction set. for_chosen_isa() chooses among them (cpu_isa.h).
#define DT_PER_ISA(...)     \
  namespace baseline {      \
  __VA_ARGS__;              \
  }                         \
  namespace DT_SECOND_ISA { \
  __VA_ARGS__;              \
  }                         \
  namespace DT_THIRD_ISA {  \
  __VA_ARGS__;              \
  }

// The definitions of such a function of a namespace, as arguments of for_isa() and for_chosen_isa().
#define DT_BY_ISA(scope, function) \
  scope::baseline::function, scope::DT_SECOND_ISA::function, scope::DT_THIRD_ISA::function
