// Chooses the kernel for this processor that sums over ranks.
#include "ddp/transport/rank_sum.h"

#include "base/cpu_isa.h"

namespace drivetrain::ddp {

void sum_range(const SumJob& job) { for_chosen_isa(DT_BY_ISA(ddp, sum_range))(job); }

}  // namespace drivetrain::ddp
