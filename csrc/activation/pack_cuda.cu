// Packing on CUDA. Includes no torch header.
#include <algorithm>

#include "activation/pack_cuda.h"
#include "base/launch_cuda.h"
#include "optim/loop_cuda.cuh"

namespace drivetrain::activation {
namespace {

using optim::kElementsPerThread;
using optim::kThreads;
using optim::kTileCuda;

// Up to eight bytes, the first the lowest; they may lie anywhere.
__device__ inline uint64_t load_bytes(const uint8_t* from, int64_t count) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) return *reinterpret_cast<const uint64_t*>(from);
  uint64_t word = 0;
  for (int k = 0; k < 8 && k < count; ++k) word |= static_cast<uint64_t>(from[k]) << (8 * k);
  return word;
}

__device__ inline void store_bytes(uint64_t word, uint8_t* to, int64_t count) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint64_t*>(to) = word;
    return;
  }
  for (int k = 0; k < 8 && k < count; ++k) to[k] = static_cast<uint8_t>(word >> (8 * k));
}

// A thread takes bytes of bits, kThreads apart, and the eight bools of each.
__global__ void __launch_bounds__(kThreads) pack_bools(const uint8_t* from, int64_t numel, uint8_t* to) {
  const int64_t num_bytes = (numel + 7) / 8, stride = static_cast<int64_t>(gridDim.x) * kTileCuda;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kTileCuda; base < num_bytes; base += stride) {
    uint64_t bools[kElementsPerThread];
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      const int64_t i = base + k * kThreads + threadIdx.x;
      if (i < num_bytes) bools[k] = load_bytes(from + 8 * i, numel - 8 * i);
    }
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      const int64_t i = base + k * kThreads + threadIdx.x;
      if (i < num_bytes) to[i] = bits_of_bools(bools[k]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) unpack_bools(const uint8_t* from, int64_t numel, uint8_t* to) {
  const int64_t num_bytes = (numel + 7) / 8, stride = static_cast<int64_t>(gridDim.x) * kTileCuda;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kTileCuda; base < num_bytes; base += stride) {
#pragma unroll
    for (int k = 0; k < kElementsPerThread; ++k) {
      const int64_t i = base + k * kThreads + threadIdx.x;
      if (i < num_bytes) store_bytes(bools_of_bits(from[i]), to + 8 * i, numel - 8 * i);
    }
  }
}

__global__ void __launch_bounds__(kThreads) convert_tiles(optim::Stream from, optim::Stream to, int64_t numel) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kTileCuda;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kTileCuda; base < numel; base += stride) {
    float values[kElementsPerThread] = {};
    optim::load_state(from, base, numel, values);
    optim::store_state(to, base, numel, values);
  }
}

// count: of what threads take one by one, kElementsPerThread each.
int64_t num_blocks(int64_t count) {
  constexpr int64_t kMaxBlocks = 1 << 14;  // fills any GPU; more tiles loop
  return std::min((count + kTileCuda - 1) / kTileCuda, kMaxBlocks);
}

}  // namespace

void pack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream) {
  if (numel == 0) return;
  launch_cuda("launching the packing of bools", pack_bools, num_blocks((numel + 7) / 8), kThreads, stream, from, numel,
              to);
}

void unpack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream) {
  if (numel == 0) return;
  launch_cuda("launching the unpacking of bools", unpack_bools, num_blocks((numel + 7) / 8), kThreads, stream, from,
              numel, to);
}

void convert_cuda(const optim::Stream& from, const optim::Stream& to, int64_t numel, void* stream) {
  if (numel == 0) return;
  launch_cuda("launching a conversion", convert_tiles, num_blocks(numel), kThreads, stream, from, to, numel);
}

}  // namespace drivetrain::activation
