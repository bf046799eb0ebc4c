// Replaces CUDA's header of that name; see cuda_runtime.h.
#pragma once

#include "cuda_runtime.h"
