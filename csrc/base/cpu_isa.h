// Declares the choice of instruction set for CPU kernels, made once; the environment variable DRIVETRAIN_ISA forces it.
#pragma once

#include <string>
#include <vector>

namespace drivetrain {

enum class Isa { kBaseline, kSecond, kThird };  // isa_namespace.h names them for this kind of processor

const char* name_of(Isa isa);

// Returns the instruction sets that this processor supports, weakest first.
std::vector<Isa> available_isas();

// Returns the strongest available instruction set, or the one that DRIVETRAIN_ISA names. Throws UserError if that name
// is unknown or unavailable.
Isa chosen_isa();

// Selects the copy of a function that was compiled for an instruction set; see DT_BY_ISA.
template <class Function>
Function* for_isa(Isa isa, Function* baseline, Function* second, Function* third) {
  return isa == Isa::kBaseline ? baseline : isa == Isa::kSecond ? second : third;
}

template <class Function>
Function* for_chosen_isa(Function* baseline, Function* second, Function* third) {
  return for_isa(chosen_isa(), baseline, second, third);
}

// Overrides the choice for this process, so that tests can compare instruction sets; "" restores the automatic choice.
void force_isa(const std::string& name);

}  // namespace drivetrain
