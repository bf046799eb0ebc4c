// How a value lives in memory: the formats, and their conversion to and from the type that rules compute in.
// Host and device; needs no torch header. A format is chosen per tile at run time, so that rules and formats add up
// instead of multiplying. loop_cpu.h and loop_cuda.cuh walk them, tile_cpu.h has the CPU's loops over a tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DT_HOST_DEVICE inline
#endif

namespace drivetrain::optim {

enum class Format : uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  // 16-bit parameters whose rounding is random: up as often as the value is near it.
  kBFloat16Stochastic,
  kFloat16Stochastic,
  // 16-bit parameters with, in `extra`, what their rounding leaves out:
  kBFloat16Remainder16,  // int16: a float32 is all there
  kBFloat16Remainder8,   // int8: its leading 24 bits are
  kBFloat16Kahan,        // a compensation in the same format
  kFloat16Kahan,
  kFloat16Master,  // float32: the value itself, of which the parameter is a copy
  // States of 8 bits per value with, in `extra`, a float32 scale per kBlock of them (Dettmers et al. 2022, section 2).
  kSigned8,   // int8, the square root of the value's share of the scale
  kSquared8,  // uint8, of values that are means of squares: the square root, in equal steps
};

// Values that share a scale. Everything that has a scale is cut up in multiples of it, counted from its first element.
constexpr int kBlock = 256;

// One array of values in one format.
struct Stream {
  void* data;
  Format format;
  void* extra = nullptr;
};

#if defined(DRIVETRAIN_ISA)
// Inside the ISA-compiled files everything inline sits in a namespace of its own: otherwise the linker may keep
// the AVX-512 copy of a function for all three.
inline namespace DRIVETRAIN_ISA {
#endif

// Of one value, without what is beside it.
DT_HOST_DEVICE int64_t bytes_of(Format format) {
  switch (format) {
    case Format::kFloat64:
      return 8;
    case Format::kFloat32:
      return 4;
    case Format::kSigned8:
    case Format::kSquared8:
      return 1;
    default:
      return 2;
  }
}

template <class To, class From>
DT_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

DT_HOST_DEVICE float float_from_bfloat16(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

constexpr uint32_t kQuiet = 0x00400000u;  // the bit that a NaN needs to stay one when its last bits are cut off

// Round to nearest even; NaN stays NaN (quiet, same sign and leading payload bits).
DT_HOST_DEVICE uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  return static_cast<uint16_t>((value != value ? bits | kQuiet : rounded) >> 16);
}

// IEEE binary16 by integer and exact float arithmetic; the CPU's and GPU's instructions give the same bits.
DT_HOST_DEVICE float float_from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  // Normal numbers: move exponent and mantissa into place and mend the exponent's bias by 112.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t inf_or_nan = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u : 0u);
  // Subnormal: magnitude * 2^-24, exact in float.
  const uint32_t subnormal =
      bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-08f);
  const uint32_t result = magnitude >= 0x7c00u ? inf_or_nan : magnitude >= 0x0400u ? normal : subnormal;
  return bits_as<float>(sign | result);
}

// Round to nearest even; overflow to infinity; NaN stays NaN.
DT_HOST_DEVICE uint16_t float16_from_float(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  // Subnormal results: adding 0.5 leaves exactly the wanted bits, rounded to nearest even by the addition itself.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t result = magnitude > 0x7f800000u    ? nan
                          : magnitude >= 0x47800000u ? 0x7c00u
                          : magnitude < 0x38800000u  ? subnormal
                                                     : normal;
  return static_cast<uint16_t>(sign | result);
}

// ---- A float32 as a bfloat16 and a remainder: as integers, value = (half << 16) + remainder. The half is the value
// rounded to nearest, ties away from zero: with ties to even, 65,537 values would share a half, one too many for 16
// bits. A NaN is a quiet NaN without remainder, so that the half shows it.
struct Split {
  uint16_t half;
  int16_t remainder;
};

DT_HOST_DEVICE Split split(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const bool is_nan = value != value;
  const uint32_t half = (is_nan ? bits | kQuiet : bits + 0x8000u) >> 16;
  const uint32_t remainder = is_nan ? 0u : bits - (half << 16);
  return {static_cast<uint16_t>(half), static_cast<int16_t>(static_cast<uint16_t>(remainder))};
}

// A zero has no negative remainder: one that is there belongs to another half, because somebody has written the
// parameter, and would make a pruned weight come out as NaN. (Any other remainder is less than the half's own
// rounding.)
DT_HOST_DEVICE int32_t belonging(uint16_t half, int32_t remainder) {
  return (half & 0x7fffu) == 0 && remainder < 0 ? 0 : remainder;
}

DT_HOST_DEVICE float join(uint16_t half, int16_t remainder) {
  return bits_as<float>((static_cast<uint32_t>(half) << 16) + static_cast<uint32_t>(belonging(half, remainder)));
}

// The same with 8 bits of remainder, after rounding to 24 bits, ties to even.
struct Split8 {
  uint16_t half;
  int8_t remainder;
};

DT_HOST_DEVICE Split8 split8(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fu + ((bits >> 8) & 1u)) & ~0xffu;
  const bool is_nan = value != value;
  const uint32_t half = (is_nan ? bits | kQuiet : rounded + 0x8000u) >> 16;
  const uint32_t remainder = is_nan ? 0u : (rounded - (half << 16)) >> 8;
  return {static_cast<uint16_t>(half), static_cast<int8_t>(static_cast<uint8_t>(remainder))};
}

DT_HOST_DEVICE float join8(uint16_t half, int8_t remainder) {
  return bits_as<float>((static_cast<uint32_t>(half) << 16) + (static_cast<uint32_t>(belonging(half, remainder)) << 8));
}

// ---- 16 bits with a compensation (Kahan 1965): the value is their sum. A compensation of more than half a step of the
// parameter belongs to another value, because somebody has written the parameter: it does not count.
DT_HOST_DEVICE float finite_or_zero(float value) {
  return (bits_as<uint32_t>(value) & 0x7fffffffu) < 0x7f800000u ? value : 0.0f;
}

// A compensation may have been rounded up to half a step, hence the little less.
constexpr float kLittleLess = 255.0f / 256.0f;

DT_HOST_DEVICE float compensated_bfloat16(uint16_t half, uint16_t compensation) {
  const float value = float_from_bfloat16(half), rest = float_from_bfloat16(compensation);
  return bfloat16_from_float(value + kLittleLess * rest) == half ? value + rest : value;
}
DT_HOST_DEVICE uint16_t compensation_bfloat16(float value, uint16_t half) {
  return bfloat16_from_float(finite_or_zero(value - float_from_bfloat16(half)));
}
DT_HOST_DEVICE float compensated_float16(uint16_t half, uint16_t compensation) {
  const float value = float_from_float16(half), rest = float_from_float16(compensation);
  return float16_from_float(value + kLittleLess * rest) == half ? value + rest : value;
}
DT_HOST_DEVICE uint16_t compensation_float16(float value, uint16_t half) {
  return float16_from_float(finite_or_zero(value - float_from_float16(half)));
}

// ---- float16 beside a float32 that it is a copy of: unless somebody has written it since, which then counts.
DT_HOST_DEVICE float master_of(float master, uint16_t half) {
  return float16_from_float(master) == half ? master : float_from_float16(half);
}

// splitmix64's mixing (Steele et al. 2014): every bit of the result depends on every bit of x.
DT_HOST_DEVICE uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// ---- Stochastic rounding. Bits are a function of a key (one per parameter and step) and the element's number alone:
// neither threads nor devices nor a restart change them. The mixing is lowbias32 (Wellons 2018).
DT_HOST_DEVICE uint64_t random_key(uint64_t seed, double steps_done) {
  return mixed(seed + static_cast<uint64_t>(steps_done));
}

DT_HOST_DEVICE uint32_t random_bits(uint64_t key, int64_t index) {
  uint32_t x = static_cast<uint32_t>(index) ^ static_cast<uint32_t>(key);
  x = (x ^ (x >> 16)) * 0x7feb352du + static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

DT_HOST_DEVICE uint16_t stochastic_bfloat16(float value, uint32_t random) {
  const uint32_t bits = bits_as<uint32_t>(value);
  return static_cast<uint16_t>((value != value ? bits | kQuiet : bits + (random >> 16)) >> 16);
}

DT_HOST_DEVICE uint16_t stochastic_float16(float value, uint32_t random) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t largest = 0x477fe000u;                        // 65504
  if (magnitude >= largest) return float16_from_float(value);  // infinity is at no distance
  // Towards zero: the step there is 2^-24 for subnormal results (which conversion to an integer cuts off), else what
  // the mantissa's last 13 bits do not reach.
  const bool subnormal = magnitude < 0x38800000u;
  const float scaled = bits_as<float>(magnitude) * 16777216.0f;
  const uint32_t floor =
      subnormal ? static_cast<uint32_t>(static_cast<int32_t>(scaled)) : (magnitude - (112u << 23)) >> 13;
  const float below = subnormal ? scaled - static_cast<float>(static_cast<int32_t>(floor))
                                : static_cast<float>(static_cast<int32_t>(magnitude & 0x1fffu)) * (1.0f / 8192.0f);
  const float drawn = static_cast<float>(static_cast<int32_t>(random >> 8)) * (1.0f / 16777216.0f);
  return static_cast<uint16_t>(sign | (floor + (drawn < below ? 1u : 0u)));
}

// ---- 8-bit codes. The largest finite magnitude of a block is its scale; what is not finite has codes of its own, so
// that it neither vanishes nor takes its block along. The scale of a block with such codes is negative: the others, all
// of them in a training that goes well, need no look at what is special.
constexpr int kSignedCodes = 126;   // 1 .. 126 and their negatives; 127: infinity, -128: NaN
constexpr int kSquaredCodes = 253;  // 1 .. 253; 254: infinity, 255: NaN
constexpr uint32_t kInfinity = 0x7f800000u;

DT_HOST_DEVICE uint32_t magnitude_bits(float value) { return bits_as<uint32_t>(value) & 0x7fffffffu; }
DT_HOST_DEVICE uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = magnitude_bits(value);
  return magnitude < kInfinity ? magnitude : 0u;
}
DT_HOST_DEVICE float with_special(float scale) { return bits_as<float>(bits_as<uint32_t>(scale) | 0x80000000u); }
DT_HOST_DEVICE bool has_special(float scale) { return (bits_as<uint32_t>(scale) >> 31) != 0; }

// The nearest integer, ties to even, for |value| < 2^22, by the addition itself: the last byte is its last byte.
DT_HOST_DEVICE uint32_t nearest_integer_bits(float value) { return bits_as<uint32_t>(value + 12582912.0f); }

// The codes of one kind, for finite blocks. They count prepared values: the values themselves, or their roots.
// scale_of: from the largest finite magnitude of those; factor_of and unit_of: what encode and decode are given instead
// of the scale.
struct SignedCode {
  using Code = int8_t;
  static constexpr int8_t kNan = -128;
  static DT_HOST_DEVICE float prepare(float value) { return value; }
  // The smallest scale: below, the factor would overflow, and the values are beneath notice.
  static DT_HOST_DEVICE float scale_of(uint32_t largest) {
    const float smallest = 9.62964972e-35f;  // 2^-113
    const float scale = bits_as<float>(largest);
    return largest == 0 ? 0.0f : scale < smallest ? smallest : scale;
  }
  static DT_HOST_DEVICE float factor_of(float scale) {
    return scale > 0 ? (kSignedCodes * kSignedCodes) / scale : 0.0f;
  }
  static DT_HOST_DEVICE float unit_of(float scale) { return scale * (1.0f / (kSignedCodes * kSignedCodes)); }
  static DT_HOST_DEVICE int8_t encode(float value, float factor) {
    const float root = sqrtf(bits_as<float>(magnitude_bits(value)) * factor);
    const float with_sign = bits_as<float>(bits_as<uint32_t>(root) | (bits_as<uint32_t>(value) & 0x80000000u));
    return static_cast<int8_t>(nearest_integer_bits(with_sign));
  }
  static DT_HOST_DEVICE float decode(int8_t code, float unit) {
    const float number = code;
    return number * fabsf(number) * unit;
  }
  static DT_HOST_DEVICE int8_t infinity(float value) {
    return static_cast<int8_t>(value < 0 ? -kSignedCodes - 1 : kSignedCodes + 1);
  }
  static DT_HOST_DEVICE float special(int8_t code, float value) {
    const uint32_t infinite = kInfinity | (code < 0 ? 0x80000000u : 0u);
    return code == kNan                                  ? bits_as<float>(0x7fc00000u)
           : code > kSignedCodes || code < -kSignedCodes ? bits_as<float>(infinite)
                                                         : value;
  }
};

// What is not zero stays so: a mean of squares that vanished beside a larger one would let its update grow a
// thousandfold.
struct SquaredCode {
  using Code = uint8_t;
  static constexpr uint8_t kNan = 255;
  static DT_HOST_DEVICE float prepare(float value) { return sqrtf(value); }
  static DT_HOST_DEVICE float scale_of(uint32_t largest) { return bits_as<float>(largest); }
  static DT_HOST_DEVICE float factor_of(float scale) { return scale > 0 ? kSquaredCodes / scale : 0.0f; }
  static DT_HOST_DEVICE float unit_of(float scale) { return scale * (1.0f / kSquaredCodes); }
  static DT_HOST_DEVICE uint8_t encode(float root, float factor) {
    const float steps = root * factor, least = root > 0 ? 1.0f : 0.0f;
    return static_cast<uint8_t>(nearest_integer_bits(steps > least ? steps : least));
  }
  static DT_HOST_DEVICE float decode(uint8_t code, float unit) {
    const float root = static_cast<float>(code) * unit;
    return root * root;
  }
  static DT_HOST_DEVICE uint8_t infinity(float) { return kSquaredCodes + 1; }
  static DT_HOST_DEVICE float special(uint8_t code, float value) {
    return code == kNan ? bits_as<float>(0x7fc00000u) : code == kSquaredCodes + 1 ? bits_as<float>(kInfinity) : value;
  }
};

// The same for any block.
template <class Kind>
DT_HOST_DEVICE typename Kind::Code encode_any(float prepared, float factor) {
  const uint32_t magnitude = magnitude_bits(prepared);
  if (magnitude > kInfinity) return Kind::kNan;
  return magnitude == kInfinity ? Kind::infinity(prepared) : Kind::encode(prepared, factor);
}
template <class Kind>
DT_HOST_DEVICE float decode_any(typename Kind::Code code, float scale) {
  return Kind::special(code, Kind::decode(code, Kind::unit_of(fabsf(scale))));
}

#if defined(DRIVETRAIN_ISA)
}  // namespace DRIVETRAIN_ISA
#endif

}  // namespace drivetrain::optim
