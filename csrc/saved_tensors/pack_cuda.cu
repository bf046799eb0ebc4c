// Packs and unpacks tensors on CUDA. Includes no torch header.
//
// The memory traffic is 1.125 bytes per bool. A conversion moves each element in both formats, such as 3 bytes from
// bfloat16 to 8-bit codes. A scale takes 4 bytes per 256 elements. To hide latency, a thread has several loads in
// flight: 64 bytes for bools, and kRowsAtOnce rows of 256 elements (8 per thread) for conversions. A warp owns the
// blocks of 8-bit codes that it writes.
#include "base/block_cuda.cuh"
#include "base/check.h"
#include "base/launch_cuda.h"
#include "base/wide_cuda.cuh"
#include "formats/row_cuda.cuh"
#include "saved_tensors/pack_cuda.h"

namespace drivetrain::saved_tensors {
namespace {

using formats::Format;
using formats::kQuad;
using formats::kQuads;
using formats::kRow;
using formats::TypedArray;

// The bools that a thread loads or stores with one instruction. Their bits fill two bytes.
constexpr int kBools = kWideBytes;
constexpr int kUnits = 4;  // groups of kBools per thread, one thread block's width apart
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

// ---- Conversions between float formats, and between them and signed codes.

// Computes SignedCode::encode of a finite value without the branch of a correctly rounded square root. The instructions
// are those that the compiler emits for arguments of at least 2^-101. On an H100, all such floats give the same bits as
// __fsqrt_rn. The code of a smaller argument is 0 in either case.
__device__ __forceinline__ int8_t encode_finite(float value, float factor) {
#ifdef __CUDA_ARCH__
  constexpr float kSmallest = 3.94430453e-31f;  // 2^-101
  const float scaled = fabsf(value) * factor, x = scaled < kSmallest ? 0.0f : scaled;
  float reciprocal;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  reciprocal = fminf(reciprocal, 3.402823466e38f);  // the reciprocal of 0 is infinite
  const float near = x * reciprocal, half = 0.5f * reciprocal;
  const float root = fmaf(fmaf(-near, near, x), half, near);
  return static_cast<int8_t>(formats::nearest_integer_bits(copysignf(root, value)));
#else
  return formats::SignedCode::encode(value, factor);
#endif
}

// A row that a warp processes, as quads of its threads, in one format. A row is one block of codes.
template <Format kFormat>
struct Row {
  formats::Neighbors<kFormat, kQuad> quads[kQuads];

  template <bool kIsWide>
  __device__ __forceinline__ void load(const TypedArray& from, int64_t row, int64_t end) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) quads[q].template load<kIsWide>(from, row + formats::quad_position(q), end);
  }

  __device__ __forceinline__ void get(float (&values)[kQuads][kQuad]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) values[q][k] = quads[q].value(k);
    }
  }

  template <bool kIsWide>
  static __device__ __forceinline__ void store(const TypedArray& to, int64_t row, int64_t end,
                                               const float (&values)[kQuads][kQuad]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      formats::Neighbors<kFormat, kQuad> quad;
      quad.set(values[q]);
      quad.template store<kIsWide>(to, row + formats::quad_position(q), end);
    }
  }
};

template <>
struct Row<Format::kSigned8> {
  using Kind = formats::SignedCode;
  uint32_t codes[kQuads][1];  // four per word
  float scale;

  template <bool kIsWide>
  __device__ __forceinline__ void load(const TypedArray& from, int64_t row, int64_t end) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int64_t i = row + formats::quad_position(q);
      const char* const at = static_cast<const char*>(from.data) + i;
      if constexpr (kIsWide) {
        load_wide(at, codes[q]);
      } else {
        load_narrow<1>(at, end - i, codes[q]);
      }
    }
    scale = kIsWide || row < end ? static_cast<const float*>(from.extra)[row / formats::kBlock] : 0.0f;
  }

  __device__ __forceinline__ void get(float (&values)[kQuads][kQuad]) const {
    const float unit = Kind::unit_of(fabsf(scale));
    const bool is_special = formats::has_special(scale);  // equal in all threads of the warp
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        const auto code = static_cast<int8_t>(byte_of(codes[q], k));
        values[q][k] = Kind::decode(code, unit);
        if (is_special) values[q][k] = Kind::special(code, values[q][k]);
      }
    }
  }

  // All threads of the warp must call it. Values beyond the end must be zero.
  template <bool kIsWide>
  static __device__ __forceinline__ void store(const TypedArray& to, int64_t row, int64_t end,
                                               const float (&values)[kQuads][kQuad]) {
    uint32_t largest = largest_of(values, formats::magnitude_bits);
    const bool is_special = largest >= formats::kInfinity;  // equal in all threads of the warp
    if (is_special) largest = largest_of(values, formats::finite_magnitude);
    const float scale = Kind::scale_of(largest), factor = Kind::factor_of(scale);
    uint32_t codes[kQuads][1];
    if (is_special) {
      encode(values, factor, codes, formats::encode_any<Kind>);
    } else {
      encode(values, factor, codes, encode_finite);
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int64_t i = row + formats::quad_position(q);
      char* const at = static_cast<char*>(to.data) + i;
      if constexpr (kIsWide) {
        store_wide(at, codes[q]);
      } else {
        store_narrow<1>(at, end - i, codes[q]);
      }
    }
    if (formats::lane_of_thread() == 0 && row < end) {
      static_cast<float*>(to.extra)[row / formats::kBlock] = is_special ? formats::with_special(scale) : scale;
    }
  }

 private:
  template <class Magnitude>
  static __device__ __forceinline__ uint32_t largest_of(const float (&values)[kQuads][kQuad], Magnitude magnitude) {
    uint32_t largest = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        const uint32_t own = magnitude(values[q][k]);
        largest = own > largest ? own : largest;
      }
    }
    return __reduce_max_sync(kAllLanes, largest);
  }

  template <class Encode>
  static __device__ __forceinline__ void encode(const float (&values)[kQuads][kQuad], float factor,
                                                uint32_t (&codes)[kQuads][1], Encode encode_one) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      codes[q][0] = 0;
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        codes[q][0] |= static_cast<uint32_t>(static_cast<uint8_t>(encode_one(values[q][k], factor))) << 8 * k;
      }
    }
  }
};

// The rows that a warp loads before it stores the first.
template <Format kFrom>
constexpr int kRowsAtOnce = kFrom == Format::kFloat64 ? 2 : 4;

template <Format kFrom, Format kTo, bool kIsWide>
__device__ __forceinline__ void convert(const TypedArray& from, const TypedArray& to, int64_t first, int64_t end) {
  Row<kFrom> rows[kRowsAtOnce<kFrom>];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce<kFrom>; ++r) rows[r].template load<kIsWide>(from, first + r * kRow, end);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce<kFrom>; ++r) {
    float values[kQuads][kQuad];
    rows[r].get(values);
    Row<kTo>::template store<kIsWide>(to, first + r * kRow, end, values);
  }
}

template <Format kFrom, Format kTo>
__global__ void __launch_bounds__(kThreads, 4) convert_rows(TypedArray from, TypedArray to, int64_t numel) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / formats::kLanes;
  const int64_t first = warp * kRowsAtOnce<kFrom> * kRow;
  if (first + kRowsAtOnce<kFrom> * kRow <= numel && is_aligned(from.data, kWideBytes) &&
      is_aligned(to.data, kWideBytes)) {
    convert<kFrom, kTo, true>(from, to, first, numel);
  } else {
    convert<kFrom, kTo, false>(from, to, first, numel);
  }
}

template <Format kFrom, Format kTo>
void launch_conversion(const TypedArray& from, const TypedArray& to, int64_t numel, void* stream) {
  constexpr int64_t kElementsOfBlock = kRowsAtOnce<kFrom> * kRow * kWarps;
  launch_cuda("launching a conversion", convert_rows<kFrom, kTo>, (numel + kElementsOfBlock - 1) / kElementsOfBlock,
              kThreads, stream, from, to, numel);
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

void convert_cuda(const TypedArray& from, const TypedArray& to, int64_t numel, void* stream) {
  if (numel == 0) return;
  // The conversions that pack.cpp uses.
#define DT_EITHER_WAY(kWhole, kPart)                                                  \
  if (from.format == Format::kWhole && to.format == Format::kPart) {                  \
    return launch_conversion<Format::kWhole, Format::kPart>(from, to, numel, stream); \
  }                                                                                   \
  if (from.format == Format::kPart && to.format == Format::kWhole) {                  \
    return launch_conversion<Format::kPart, Format::kWhole>(from, to, numel, stream); \
  }
  DT_EITHER_WAY(kFloat32, kBFloat16)
  DT_EITHER_WAY(kFloat64, kBFloat16)
  DT_EITHER_WAY(kFloat32, kSigned8)
  DT_EITHER_WAY(kBFloat16, kSigned8)
  DT_EITHER_WAY(kFloat16, kSigned8)
#undef DT_EITHER_WAY
  DT_INVARIANT(!"no kernel converts these formats");
}

}  // namespace drivetrain::saved_tensors
