// Defines the float8 states of state_bits="fp8" (Micikevicius et al. 2022): e4m3 for means and e5m2 for means of
// squares. Each block of kBlock values has a float32 scale. Host and device; needs no torch header.
#pragma once

#include "formats/storage.h"

namespace drivetrain::formats {

DT_BEGIN_ISA

// A float with one sign bit, kExponentBits and kMantissaBits, by integer and exact float arithmetic.
template <int kExponentBits, int kMantissaBits>
struct Float8 {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;  // from its mantissa to float's
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;  // bits of 2^(1 - kBias)
  // Bits of a float whose last bit has the value of the smallest number here. An addition to it rounds to that number.
  static constexpr uint32_t kRounding = static_cast<uint32_t>(128 - kBias - kMantissaBits + 23) << 23;

  // Rounds a magnitude to nearest even. The result must be finite.
  static DT_HOST_DEVICE uint32_t encode(float magnitude) {
    const uint32_t bits = bits_as<uint32_t>(magnitude);
    const uint32_t normal = (bits - kRebias + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift;
    const uint32_t subnormal = bits_as<uint32_t>(magnitude + bits_as<float>(kRounding)) - kRounding;
    return bits < kSmallestNormal ? subnormal : normal;
  }
  static DT_HOST_DEVICE float decode(uint32_t code) {
    constexpr uint32_t kSmallest = static_cast<uint32_t>(128 - kBias - kMantissaBits) << 23;
    const float subnormal = static_cast<float>(static_cast<int32_t>(code)) * bits_as<float>(kSmallest);
    return code < (1u << kMantissaBits) ? subnormal : bits_as<float>((code << kShift) + kRebias);
  }
};

// The two kinds below have the interface of SignedCode. A value is its code's number times the scale, as torch reads
// it: codes.float() * scale.
struct SignedFloat8 : Codes8 {
  using Code = uint8_t;
  using Number = Float8<4, 3>;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr uint8_t kInfinite = 0x7e;  // e4m3 has no infinity, so finite values end one number below its largest
  static constexpr float kLargest = 416.0f;
  static constexpr float kSmallestScale = 0x1p-118f;  // a smaller one would make its reciprocal overflow

  static DT_HOST_DEVICE float prepare(float value) { return value; }
  static DT_HOST_DEVICE float scale_of(uint32_t largest) {
    const float scale = bits_as<float>(largest) * (1.0f / kLargest);
    return largest == 0 ? 0.0f : scale < kSmallestScale ? kSmallestScale : scale;
  }
  static DT_HOST_DEVICE float factor_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }
  static DT_HOST_DEVICE float unit_of(float scale) { return scale; }
  static DT_HOST_DEVICE uint8_t encode(float value, float factor) {
    const uint32_t sign = (bits_as<uint32_t>(value) >> 24) & 0x80u;
    return static_cast<uint8_t>(sign | Number::encode(bits_as<float>(magnitude_bits(value)) * factor));
  }
  static DT_HOST_DEVICE float decode(uint8_t code, float unit) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    return bits_as<float>(sign | bits_as<uint32_t>(Number::decode(code & 0x7fu))) * unit;
  }
  static DT_HOST_DEVICE uint8_t infinity(float value) {
    return static_cast<uint8_t>((value < 0 ? 0x80 : 0) | kInfinite);
  }
  static DT_HOST_DEVICE float special(uint8_t code, float value) {
    const uint32_t infinite = kInfinity | (static_cast<uint32_t>(code & 0x80u) << 24);
    return (code & 0x7fu) == kNan        ? bits_as<float>(0x7fc00000u)
           : (code & 0x7fu) == kInfinite ? bits_as<float>(infinite)
                                         : value;
  }
};

// Prepared values are square roots, as SquaredCode's are. A nonzero value keeps a nonzero code.
struct SquaredFloat8 : Codes8 {
  using Code = uint8_t;
  using Number = Float8<5, 2>;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr uint8_t kInfinite = 0x7c;
  static constexpr float kLargest = 57344.0f;
  static constexpr float kSmallestScale = 0x1p-118f;

  static DT_HOST_DEVICE float prepare(float value) { return sqrtf(value); }
  static DT_HOST_DEVICE float scale_of(uint32_t largest) {
    const float root = bits_as<float>(largest);
    const float scale = root * (root * (1.0f / kLargest));
    return largest == 0 ? 0.0f : scale < kSmallestScale ? kSmallestScale : scale;
  }
  static DT_HOST_DEVICE float factor_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }
  static DT_HOST_DEVICE float unit_of(float scale) { return scale; }
  static DT_HOST_DEVICE uint8_t encode(float root, float factor) {
    const uint32_t code = Number::encode(root * (root * factor)), least = root > 0 ? 1u : 0u;
    return static_cast<uint8_t>(code > least ? code : least);
  }
  static DT_HOST_DEVICE float decode(uint8_t code, float unit) { return Number::decode(code) * unit; }
  static DT_HOST_DEVICE uint8_t infinity(float) { return kInfinite; }
  static DT_HOST_DEVICE float special(uint8_t code, float value) {
    return code == kNan ? bits_as<float>(0x7fc00000u) : code == kInfinite ? bits_as<float>(kInfinity) : value;
  }
};

DT_END_ISA

}  // namespace drivetrain::formats
