// Defines the functions of check.h that need not be inline.
#include "base/check.h"

#include <cstdio>

namespace drivetrain {

// Formats like iostreams and printf's %g: six significant digits, and an exponent where that is shorter.
void append_float(std::string& out, double value) {
  char digits[32];
  out.append(digits, static_cast<size_t>(std::snprintf(digits, sizeof digits, "%g", value)));
}

void invariant_failed(const char* condition, const char* file, int line) {
  throw InvariantError(text("drivetrain's invariant does not hold: ", condition, " (", file, ":", line,
                            "). This is a bug in drivetrain; please report it with this line."));
}

}  // namespace drivetrain
