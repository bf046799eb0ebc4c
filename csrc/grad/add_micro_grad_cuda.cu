// Accumulates a gradient on CUDA. Includes no torch header.
//
// The memory traffic per element of a 16-bit micro-batch gradient is 2 + 4 + 4 bytes into float32. It is 2 + 3 + 3
// bytes into bfloat16 with a byte of remainder. A thread takes 16 elements, in units of neighbors whose widest array
// makes 16 bytes. It issues the loads of all units at once: 96 bytes into float32, 80 into bfloat16 with a byte.
#include "base/block_cuda.cuh"
#include "base/launch_cuda.h"
#include "base/wide_cuda.cuh"
#include "formats/decode_cuda.cuh"
#include "grad/add_micro_grad.h"

namespace drivetrain::grad {
namespace {

using formats::Format;

constexpr int kElements = 16;  // elements per thread
constexpr int kTile = kThreads * kElements;

// Elements of a unit: 16 bytes of the main gradient's values.
template <Format kMain>
constexpr int kWidthOf = kMain == Format::kFloat32 ? 4 : 8;

// Accumulates a thread's units from its element `first` on; they lie a block's width apart.
template <Format kMain, Format kMicro, bool kIsWide>
__device__ __forceinline__ void accumulate_units(const Addition& addition, int64_t first, int64_t numel) {
  constexpr int kWidth = kWidthOf<kMain>, kUnits = kElements / kWidth, kStride = kThreads * kWidth;
  formats::Neighbors<kMicro, kWidth> micro[kUnits];
  formats::Neighbors<kMain, kWidth> main[kUnits];
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
