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

// Overrides the choice for this process (tests compare instruction sets with it); "" goes back to the automatic one.
void force_isa(const std::string& name);

}  // namespace drivetrain
