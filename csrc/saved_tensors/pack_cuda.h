// Declares the launches of packing kernels on a CUDA stream (a cudaStream_t). Needs no torch header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::saved_tensors {

// Pack bools into bits, the first in the lowest bit of a byte, and back. The layout is the CPU's of the values 0 and 1;
// see saved_tensors/bits.h.
void pack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);
void unpack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream);

// Converts an array: float32 or float64 to bfloat16, float32 or 16-bit floats to signed codes, and back.
void convert_cuda(const formats::TypedArray& from, const formats::TypedArray& to, int64_t numel, void* stream);

}  // namespace drivetrain::saved_tensors
