// Stands for the header of that name, which asks for parts of the CUDA compiler that torch's packages do not bring:
// host code needs of it the runtime's functions.
#pragma once

#include <cuda_runtime_api.h>
