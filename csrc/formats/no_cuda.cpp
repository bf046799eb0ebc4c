// Answers for the conversion of storage formats on CUDA in a build without nvcc.
#include "base/no_cuda.h"

#include "formats/convert.h"

namespace drivetrain::formats {

void convert_cuda(const Conversion*, int32_t, int64_t, void*) { refuse_cuda(); }

}  // namespace drivetrain::formats
