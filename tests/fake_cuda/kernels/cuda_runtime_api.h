// Replaces CUDA's header of that name where kernels are compiled as C++; see cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"
