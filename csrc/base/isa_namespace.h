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

// Declares a function that a file defines once per instruction set. for_chosen_isa() chooses among them (cpu_isa.h).
#define DT_PER_ISA(...) \
  namespace baseline {  \
  __VA_ARGS__;          \
  }                     \
  namespace avx2 {      \
  __VA_ARGS__;          \
  }                     \
  namespace avx512 {    \
  __VA_ARGS__;          \
  }
