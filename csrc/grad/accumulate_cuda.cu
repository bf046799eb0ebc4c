// A gradient's accumulation on CUDA. Includes no torch header.
//
// Moves per element of a 16-bit micro-gradient 2 + 4 + 4 bytes into float32, and 2 + 3 + 3 into bfloat16 with a byte
// beside it. A thread takes 16 elements, in units of neighbors whose widest stream makes 16 bytes, and has the loads of
// all units under way at once: 96 bytes into float32, 80 into bfloat16 with a byte.
#include "base/launch_cuda.h"
#include "base/wide_cuda.cuh"
#include "grad/accumulate.h"
#include "optim/decode_cuda.cuh"

namespace drivetrain::grad {
namespace {

using optim::Format;
using optim::Stream;

constexpr int kThreads = 256;
constexpr int kElements = 16;  // of a thread
constexpr int kTile = kThreads * kElements;

// A thread's unit of a stream, kWidth neighbors as they lie in memory.
template <Format kFormat, int kWidth>
struct Unit {
  static constexpr int kBytes = optim::bytes_of(kFormat);
  static constexpr bool kHasByte = kFormat == Format::kBFloat16Remainder8;
  uint32_t words[kWidth * kBytes / 4];
  uint32_t extra[kWidth / 4];

  template <bool kIsWide>
  __device__ __forceinline__ void load(const Stream& stream, int64_t first, int64_t end) {
    const char* const from = static_cast<const char*>(stream.data) + first * kBytes;
    const char* const beside = static_cast<const char*>(stream.extra) + first;
    if constexpr (kIsWide) {
      load_wide(from, words);
      if constexpr (kHasByte) load_wide(beside, extra);
    } else {
      load_narrow<kBytes>(from, end - first, words);
      if constexpr (kHasByte) load_narrow<1>(beside, end - first, extra);
    }
  }

  template <bool kIsWide>
  __device__ __forceinline__ void store(const Stream& stream, int64_t first, int64_t end) const {
    char* const to = static_cast<char*>(stream.data) + first * kBytes;
    char* const beside = static_cast<char*>(stream.extra) + first;
    if constexpr (kIsWide) {
      store_wide(to, words);
      if constexpr (kHasByte) store_wide(beside, extra);
    } else {
      store_narrow<kBytes>(to, end - first, words);
      if constexpr (kHasByte) store_narrow<1>(beside, end - first, extra);
    }
  }

  __device__ __forceinline__ float value(int k) const {
    if constexpr (kFormat == Format::kFloat64) return static_cast<float>(optim::double_of(words, k));
    if constexpr (kFormat == Format::kBFloat16) return optim::bfloat16_of(words, k);
    if constexpr (kFormat == Format::kFloat16) return optim::float16_of(words, k);
    if constexpr (kHasByte) return optim::join8(half_of(words, k), static_cast<int8_t>(byte_of(extra, k)));
    return optim::bits_as<float>(words[kFormat == Format::kFloat32 ? k : 0]);
  }

  __device__ __forceinline__ void set(const float (&values)[kWidth]) {
    if constexpr (kHasByte) {
      optim::split8_into(values, words, extra);
    } else {
      static_assert(kHasByte || kBytes == 4);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) words[k] = optim::bits_as<uint32_t>(values[k]);
    }
  }
};

// Neighbors of a unit: 16 bytes of the main gradient's values.
template <Format kMain>
constexpr int kWidthOf = kMain == Format::kFloat32 ? 4 : 8;

// first: the thread's first element; its units lie a block's width apart.
template <Format kMain, Format kMicro, bool kIsWide>
__device__ __forceinline__ void accumulate_units(const Addition& addition, int64_t first, int64_t numel) {
  constexpr int kWidth = kWidthOf<kMain>, kUnits = kElements / kWidth, kStride = kThreads * kWidth;
  Unit<kMicro, kWidth> micro[kUnits];
  Unit<kMain, kWidth> main[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) micro[u].template load<kIsWide>(addition.micro, first + u * kStride, numel);
  if (!addition.starts) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) main[u].template load<kIsWide>(addition.main, first + u * kStride, numel);
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float sum[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] = micro[u].value(k);
    if (!addition.starts) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] = main[u].value(k) + sum[k];
    }
    main[u].set(sum);
    main[u].template store<kIsWide>(addition.main, first + u * kStride, numel);
  }
}

template <Format kMain, Format kMicro>
__global__ void __launch_bounds__(kThreads) accumulate_tiles(Addition addition, int64_t numel) {
  constexpr int kWidth = kWidthOf<kMain>;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t first = tile + static_cast<int64_t>(threadIdx.x) * kWidth;
  if (tile + kTile <= numel && is_aligned(addition.main.data, kWideBytes) && is_aligned(addition.main.extra, kWidth) &&
      is_aligned(addition.micro.data, kWideBytes)) {
    accumulate_units<kMain, kMicro, true>(addition, first, numel);
  } else {
    accumulate_units<kMain, kMicro, false>(addition, first, numel);
  }
}

template <Format kMain>
void launch(const Addition& addition, int64_t numel, void* stream) {
  const auto kernel = [&] {
    switch (addition.micro.format) {
      case Format::kFloat64:
        return accumulate_tiles<kMain, Format::kFloat64>;
      case Format::kBFloat16:
        return accumulate_tiles<kMain, Format::kBFloat16>;
      case Format::kFloat16:
        return accumulate_tiles<kMain, Format::kFloat16>;
      default:
        return accumulate_tiles<kMain, Format::kFloat32>;
    }
  }();
  launch_cuda("launching a gradient's accumulation", kernel, (numel + kTile - 1) / kTile, kThreads, stream, addition,
              numel);
}

}  // namespace

void accumulate_cuda(const Addition& addition, int64_t numel, void* stream) {
  if (numel == 0) return;
  if (addition.main.format == Format::kBFloat16Remainder8) {
    launch<Format::kBFloat16Remainder8>(addition, numel, stream);
  } else {
    launch<Format::kFloat32>(addition, numel, stream);
  }
}

}  // namespace drivetrain::grad
