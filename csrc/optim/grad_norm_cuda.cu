// Sums squares of gradients on CUDA, one warp per chunk. Includes no torch header.
//
// Moves 4 bytes per element in float32, 2 in 16 bits, and 8 per chunk. Each element takes one conversion to double and
// one fused multiply-add (summation_cuda.cuh).
#include "base/block_cuda.cuh"
#include "base/launch_cuda.h"
#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "formats/summation_cuda.cuh"
#include "optim/cuda_step.h"

namespace drivetrain::optim {
namespace {

constexpr int kBytesAtOnce = 64;  // outstanding loads of a thread

// Sums a chunk of elements of kBytes bytes. value_of(words, k) returns element k of the words of a quad.
template <int kBytes, class ValueOf>
__device__ __forceinline__ double sum_of_chunk(const void* data, int64_t begin, int64_t end, ValueOf value_of) {
  constexpr int kQuads = kBytesAtOnce / (kQuad * kBytes);
  const auto* values = static_cast<const char*>(data);
  const bool is_wide = is_aligned(data, kWideBytes);
  double slots[kQuad] = {};
  for (int64_t base = begin; base < end; base += kQuads * kSlots) {
    const int64_t first = base + lane_of_thread() * kQuad;
    uint32_t words[kQuads][kQuad * kBytes / 4];
    if (is_wide && base + kQuads * kSlots <= end) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) load_wide(values + (first + q * kSlots) * kBytes, words[q]);
    } else {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int64_t i = first + q * kSlots;
        load_narrow<kBytes>(values + i * kBytes, end - i, words[q]);
      }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      decltype(value_of(words[q], 0)) own[kQuad];
#pragma unroll
      for (int k = 0; k < kQuad; ++k) own[k] = value_of(words[q], k);
      add_squares(own, slots);
    }
  }
  return sum_of_slots(slots);
}

__device__ double chunk_sum(const TypedArray& stream, int64_t numel, int64_t chunk) {
  const int64_t begin = chunk * kChunk, end = numel < begin + kChunk ? numel : begin + kChunk;
  switch (stream.format) {
    case Format::kFloat64:
      return sum_of_chunk<8>(stream.data, begin, end, [](const auto& words, int k) { return double_of(words, k); });
    case Format::kBFloat16:
      return sum_of_chunk<2>(stream.data, begin, end, [](const auto& words, int k) { return bfloat16_of(words, k); });
    case Format::kFloat16:
      return sum_of_chunk<2>(stream.data, begin, end, [](const auto& words, int k) { return float16_of(words, k); });
    default:
      return sum_of_chunk<4>(stream.data, begin, end,
                             [](const auto& words, int k) { return bits_as<float>(words[k]); });
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    chunk_sums(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums) {
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (chunk >= num_chunks) return;
  const ParamJob& param = params[last_from_in_warp(params, num_params, &ParamJob::first_chunk, chunk)];
  const double sum = chunk_sum(param.grad, param.numel, chunk - param.first_chunk);
  if (lane_of_thread() == 0) sums[chunk] = sum;
}

__global__ void __launch_bounds__(kThreads, 4)
    chunk_sums_of(TypedArray values, int64_t numel, int64_t num_chunks, double* sums) {
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (chunk >= num_chunks) return;
  const double sum = chunk_sum(values, numel, chunk);
  if (lane_of_thread() == 0) sums[chunk] = sum;
}

}  // namespace

void chunk_sums_cuda(const TypedArray& values, int64_t numel, double* sums, void* stream) {
  const int64_t chunks = num_chunks(numel);
  if (chunks == 0) return;
  launch_cuda("launching the norm of a gradient", chunk_sums_of, (chunks + kWarps - 1) / kWarps, kThreads, stream,
              values, numel, chunks, sums);
}

void chunk_sums_cuda(const ParamJob* params, int32_t num_params, int64_t num_chunks, double* sums, void* stream) {
  if (num_chunks == 0) return;
  launch_cuda("launching the norm of gradients", chunk_sums, (num_chunks + kWarps - 1) / kWarps, kThreads, stream,
              params, num_params, num_chunks, sums);
}

}  // namespace drivetrain::optim
