// Replaces CUDA's header of that name, which needs compiler headers that torch's packages lack. Host code needs only
// the runtime's functions.
#pragma once

#include <cuda_runtime_api.h>
