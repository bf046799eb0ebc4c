// Replaces CUDA's header of that name, which the runtime headers include and torch's packages lack. It defines CUDA's
// keywords for g++.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define CUDARTAPI
#define CUDARTAPI_CDECL
