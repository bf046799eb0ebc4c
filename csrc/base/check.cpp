// Throws what check.h's macros report, so that the macro itself stays one comparison.
#include "base/check.h"

namespace drivetrain {

void invariant_failed(const char* condition, const char* file, int line) {
  throw InvariantError(text("drivetrain broke its own rule: ", condition, " (", file, ":", line,
                            "). This is a bug in drivetrain; please report it with this line."));
}

}  // namespace drivetrain
