// Packing on CUDA. Includes no torch header.
//
// A bool moves 1 byte and an eighth. A conversion of an element moves what it has in both formats: of bfloat16 to 8
// bits and back 3 bytes, and 4 for a scale per 256 elements. A thread has 64 bytes of loads under way for bools, and of
// what is converted kRowsAtOnce rows of 256 elements, 8 elements each; a warp owns the blocks of 8-bit codes that it
// writes.
#include "activation/pack_cuda.h"
#include "base/launch_cuda.h"
#include "base/wide_cuda.cuh"
#include "optim/row_cuda.cuh"

namespace drivetrain::activation {
namespace {

using optim::Format;
using optim::kQuad;
using optim::kQuads;
using optim::kRow;
using optim::Stream;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / grad::kLanes;

// Bools of a thread, which it loads or stores at once; their bits are two bytes.
constexpr int kBools = kWideBytes;
constexpr int kUnits = 4;  // of kBools, a block's width apart
constexpr int kBoolsOfBlock = kThreads * kBools * kUnits;

__device__ __forceinline__ uint64_t eight_of(const uint32_t (&words)[kBools / 4], int k) {
  return static_cast<uint64_t>(words[2 * k + 1]) << 32 | words[2 * k];
}

__global__ void __launch_bounds__(kThreads) pack_bools(const uint8_t* from, int64_t numel, uint8_t* to) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kBoolsOfBlock;
  const int64_t first = base + static_cast<int64_t>(threadIdx.x) * kBools;
  uint32_t words[kUnits][kBools / 4];
  if (base + kBoolsOfBlock <= numel && is_aligned(from, kWideBytes) && is_aligned(to, 2)) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) load_wide(from + first + u * kThreads * kBools, words[u]);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint32_t low = bits_of_bools(eight_of(words[u], 0)), high = bits_of_bools(eight_of(words[u], 1));
      reinterpret_cast<uint16_t*>(to)[(first + u * kThreads * kBools) / kBools] =
          static_cast<uint16_t>(low | high << 8);
    }
    return;
  }
#pragma unroll 1
  for (int u = 0; u < kUnits; ++u) {
    const int64_t i = first + u * kThreads * kBools;
    load_narrow<1>(from + i, numel - i, words[0]);
    if (i < numel) to[i / 8] = bits_of_bools(eight_of(words[0], 0));
    if (i + 8 < numel) to[i / 8 + 1] = bits_of_bools(eight_of(words[0], 1));
  }
}

__global__ void __launch_bounds__(kThreads) unpack_bools(const uint8_t* from, int64_t numel, uint8_t* to) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kBoolsOfBlock;
  const int64_t first = base + static_cast<int64_t>(threadIdx.x) * kBools;
  const auto bools_of = [](uint32_t bits, uint32_t (&words)[kBools / 4]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint64_t eight = bools_of_bits(static_cast<uint8_t>(bits >> 8 * k));
      words[2 * k] = static_cast<uint32_t>(eight);
      words[2 * k + 1] = static_cast<uint32_t>(eight >> 32);
    }
  };
  if (base + kBoolsOfBlock <= numel && is_aligned(to, kWideBytes) && is_aligned(from, 2)) {
    uint16_t bits[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      bits[u] = reinterpret_cast<const uint16_t*>(from)[(first + u * kThreads * kBools) / kBools];
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint32_t words[kBools / 4];
      bools_of(bits[u], words);
      store_wide(to + first + u * kThreads * kBools, words);
    }
    return;
  }
#pragma unroll 1
  for (int u = 0; u < kUnits; ++u) {
    const int64_t i = first + u * kThreads * kBools;
    const uint32_t low = i < numel ? from[i / 8] : 0u, high = i + 8 < numel ? from[i / 8 + 1] : 0u;
    uint32_t words[kBools / 4];
    bools_of(low | high << 8, words);
    store_narrow<1>(to + i, numel - i, words);
  }
}

// ---- Conversions.

// Writes the thread's quads of a row.
template <Format kTo>
struct RowWriter {
  static constexpr int kBytes = optim::bytes_of(kTo);

  static __device__ __forceinline__ void store_quads(const Stream& to, int64_t row, int64_t end, bool is_wide,
                                                     const uint32_t (&quads)[kQuads][kBytes]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int64_t i = row + optim::quad_position(q);
      char* const at = static_cast<char*>(to.data) + i * kBytes;
      if (is_wide) {
        store_wide(at, quads[q]);
      } else {
        store_narrow<kBytes == 8 ? 4 : kBytes>(at, (end - i) * (kBytes == 8 ? 2 : 1), quads[q]);
      }
    }
  }

  static __device__ __forceinline__ void store(const Stream& to, int64_t row, int64_t end, bool is_wide,
                                               const float (&values)[kQuads][kQuad]) {
    uint32_t quads[kQuads][kBytes];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) put(values[q][k], k, quads[q]);
    }
    store_quads(to, row, end, is_wide, quads);
  }

  static __device__ __forceinline__ void put(float value, int k, uint32_t (&words)[kBytes]) {
    if constexpr (kTo == Format::kFloat64) {
      const auto bits = optim::bits_as<uint64_t>(static_cast<double>(value));
      words[2 * k] = static_cast<uint32_t>(bits);
      words[2 * k + 1] = static_cast<uint32_t>(bits >> 32);
    } else if constexpr (kTo == Format::kFloat32) {
      words[k] = optim::bits_as<uint32_t>(value);
    } else {
      const uint32_t half =
          kTo == Format::kBFloat16 ? optim::bfloat16_from_float(value) : optim::float16_from_float(value);
      words[k / 2] = k % 2 == 0 ? half : words[k / 2] | half << 16;
    }
  }
};

// SignedCode::encode of a finite value, with the root's bits but without its branch: the instructions that the compiler
// has for it where the argument is at least 2^-101 (on an H100, all such floats gave the same bits as __fsqrt_rn). The
// code of what is smaller is 0 in any case.
__device__ __forceinline__ int8_t encode_finite(float value, float factor) {
#ifdef __CUDA_ARCH__
  constexpr float kSmallest = 3.94430453e-31f;  // 2^-101
  const float scaled = fabsf(value) * factor, x = scaled < kSmallest ? 0.0f : scaled;
  float reciprocal;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  reciprocal = fminf(reciprocal, 3.402823466e38f);  // of 0
  const float near = x * reciprocal, half = 0.5f * reciprocal;
  const float root = fmaf(fmaf(-near, near, x), half, near);
  return static_cast<int8_t>(optim::nearest_integer_bits(copysignf(root, value)));
#else
  return optim::SignedCode::encode(value, factor);
#endif
}

// A row is a block of codes; all threads of the warp call it.
template <>
__device__ __forceinline__ void RowWriter<Format::kSigned8>::store(const Stream& to, int64_t row, int64_t end,
                                                                   bool is_wide, const float (&values)[kQuads][kQuad]) {
  using Kind = optim::SignedCode;
  constexpr unsigned kAll = 0xffffffffu;
  uint32_t largest = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {  // zeros stand for what is beyond the end
      const uint32_t magnitude = optim::magnitude_bits(values[q][k]);
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  largest = __reduce_max_sync(kAll, largest);
  const bool is_special = largest >= optim::kInfinity;  // the same for all threads
  if (is_special) {
    largest = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        const uint32_t magnitude = optim::finite_magnitude(values[q][k]);
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    largest = __reduce_max_sync(kAll, largest);
  }
  const float scale = Kind::scale_of(largest), factor = Kind::factor_of(scale);
  uint32_t quads[kQuads][1];
  const auto encode_all = [&](const auto& encode) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      quads[q][0] = 0;
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        quads[q][0] |= static_cast<uint32_t>(static_cast<uint8_t>(encode(values[q][k], factor))) << 8 * k;
      }
    }
  };
  if (is_special) {
    encode_all(optim::encode_any<Kind>);
  } else {
    encode_all(encode_finite);
  }
  store_quads(to, row, end, is_wide, quads);
  if (grad::lane_of_thread() == 0) {
    static_cast<float*>(to.extra)[row / optim::kBlock] = is_special ? optim::with_special(scale) : scale;
  }
}

// A warp takes kRowsAtOnce rows. Both streams are plain or signed codes.
template <Format kTo>
__global__ void __launch_bounds__(kThreads, 4) convert_rows(Stream from, Stream to, int64_t numel) {
  constexpr int kRowsAtOnce = 4;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / grad::kLanes;
  const int64_t first = warp * kRowsAtOnce * kRow;
  const bool is_wide = first + kRowsAtOnce * kRow <= numel && optim::has_wide_quads(from) &&
                       is_aligned(to.data, kWideBytes) && from.format != Format::kFloat64;
  optim::RawQuads<false> raw[kRowsAtOnce];
  if (is_wide) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) raw[r].load(from, first + r * kRow);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = first + r * kRow;
    if (row >= numel) return;  // the whole warp
    float values[kQuads][kQuad];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (is_wide) {
        raw[r].decode(from.format, q, values[q]);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        const int64_t i = row + optim::quad_position(q) + k;
        values[q][k] = i < numel ? optim::load_element<float>(from, i) : 0.0f;
      }
    }
    RowWriter<kTo>::store(to, row, numel, is_wide, values);
  }
}

template <Format kTo>
void launch_conversion(const Stream& from, const Stream& to, int64_t numel, void* stream) {
  constexpr int64_t kElementsOfBlock = 4 * kRow * kWarps;
  launch_cuda("launching a conversion", convert_rows<kTo>, (numel + kElementsOfBlock - 1) / kElementsOfBlock, kThreads,
              stream, from, to, numel);
}

int64_t num_blocks(int64_t bools) { return (bools + kBoolsOfBlock - 1) / kBoolsOfBlock; }

}  // namespace

void pack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream) {
  if (numel == 0) return;
  launch_cuda("launching the packing of bools", pack_bools, num_blocks(numel), kThreads, stream, from, numel, to);
}

void unpack_bools_cuda(const uint8_t* from, int64_t numel, uint8_t* to, void* stream) {
  if (numel == 0) return;
  launch_cuda("launching the unpacking of bools", unpack_bools, num_blocks(numel), kThreads, stream, from, numel, to);
}

void convert_cuda(const Stream& from, const Stream& to, int64_t numel, void* stream) {
  if (numel == 0) return;
  switch (to.format) {
    case Format::kFloat64:
      return launch_conversion<Format::kFloat64>(from, to, numel, stream);
    case Format::kBFloat16:
      return launch_conversion<Format::kBFloat16>(from, to, numel, stream);
    case Format::kFloat16:
      return launch_conversion<Format::kFloat16>(from, to, numel, stream);
    case Format::kSigned8:
      return launch_conversion<Format::kSigned8>(from, to, numel, stream);
    default:
      return launch_conversion<Format::kFloat32>(from, to, numel, stream);
  }
}

}  // namespace drivetrain::activation
