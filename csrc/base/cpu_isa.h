// Declares the choice of instruction set for CPU kernels, made once; the environment variable DRIVETRAIN_ISA forces it.
#pragma once

#include <string>
#include <vector>

namespace drivetrain {

enum class Isa { kBaseline, kAvx2, kAvx512 };

const char* name_of(Isa isa);

// Returns the instruction sets that this processor supports, weakest first.
std::vector<Isa> available_isas();

// Returns the strongest available instruction set, or the one that DRIVETRAIN_ISA names. Throws UserError if that name
// is unknown or unavailable.
Isa chosen_isa();

// Selects the copy of a function that was compiled for the chosen instruction set.
template <class Function>
Function* for_chosen_isa(Function* baseline, Function* avx2, Function* avx512) {
  switch (chosen_isa()) {
    case Isa::kBaseline:
      return baseline;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      break;
  }
  return avx512;
}

// Overrides the choice for this process, so that tests can compare instruction sets; "" restores the automatic choice.
void force_isa(const std::string& name);

}  // namespace drivetrain
