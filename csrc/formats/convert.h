// Declares conversions of values between storage formats, many tensors in one pass. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "formats/storage.h"

namespace drivetrain::formats {

// Writes `numel` values of `from`, or of `fill` where from.data is null, to `to`. Both may be the same memory, as when
// a parameter is split into halves and remainders. Element i depends on element i alone, or on its block where `to` has
// blocks. float64 can only be filled.
struct Conversion {
  TypedArray from, to;
  int64_t numel;
  int64_t first_chunk;  // index within the pass
  double fill;
};

// Elements that a block of threads, or an iteration of a parallel loop, converts: a whole number of blocks with a
// scale.
constexpr int64_t kConversionChunk = 16 * kBlock;

inline int64_t num_conversion_chunks(int64_t numel) { return (numel + kConversionChunk - 1) / kConversionChunk; }

// Writes values from one array into another, rounded as that one's format rounds. `key` seeds stochastic rounding. One
// copy per instruction set.
DT_PER_ISA(void convert_cpu(const TypedArray& from, const TypedArray& to, int64_t numel, uint64_t key))

// Enqueues all conversions in one launch on a CUDA stream (cudaStream_t) and does not wait. `conversions` and the
// arrays are on the device.
void convert_cuda(const Conversion* conversions, int32_t count, int64_t num_chunks, void* stream);

}  // namespace drivetrain::formats
