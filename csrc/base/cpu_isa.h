// Which instruction set the CPU kernels run with: chosen once, forceable by the environment variable DRIVETRAIN_ISA.
#pragma once

#include <string>
#include <vector>

namespace drivetrain {

enum class Isa { kBaseline, kAvx2, kAvx512 };

const char* name_of(Isa isa);

// Those that this processor can run, weakest first.
std::vector<Isa> available_isas();

// The strongest available one, or what DRIVETRAIN_ISA says. Throws UserError if that is unknown or unavailable.
Isa chosen_isa();

// The one of a function's copies to call.
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

// Overrides the choice for this process (tests compare instruction sets with it); "" goes back to the automatic one.
void force_isa(const std::string& name);

}  // namespace drivetrain
