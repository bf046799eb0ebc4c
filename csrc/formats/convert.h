// Values that go from one storage format to another, many tensors in one pass: the pass as plain data. Needs no torch
// header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::formats {

// `numel` values of `from`, or as many times `fill` where from.data is null, written to `to`. Both may be the same
// memory, as when a parameter is split into halves and remainders: element i depends on element i alone, or on its
// block where `to` has blocks. float64 is only ever filled.
struct Conversion {
  TypedArray from, to;
  int64_t numel;
  int64_t first_chunk;  // within the pass
  double fill;
};

// What a block of threads, or an entry of a parallel loop, converts: a whole number of blocks with a scale.
constexpr int64_t kConversionChunk = 16 * kBlock;

inline int64_t num_conversion_chunks(int64_t numel) { return (numel + kConversionChunk - 1) / kConversionChunk; }

// Writes values from one array into another, rounded as that one's format rounds. `key` seeds stochastic rounding. One
// copy per instruction set.
namespace baseline {
void convert_cpu(const TypedArray& from, const TypedArray& to, int64_t numel, uint64_t key);
}
namespace avx2 {
void convert_cpu(const TypedArray& from, const TypedArray& to, int64_t numel, uint64_t key);
}
namespace avx512 {
void convert_cpu(const TypedArray& from, const TypedArray& to, int64_t numel, uint64_t key);
}

// One launch for all of them, on a CUDA array (cudaStream_t), without a wait. `conversions` and what they point to are
// on the device.
void convert_cuda(const Conversion* conversions, int32_t count, int64_t num_chunks, void* stream);

}  // namespace drivetrain::formats
