// Packs two distinct values into bits and back on the CPU. Compiled once per instruction set, which DRIVETRAIN_ISA
// names, and includes no torch header.
#include <cstring>

#include "saved_tensors/bits.h"

namespace drivetrain::saved_tensors::DRIVETRAIN_ISA {
namespace {

// Sets `bits` to whether each element of a block differs from the first value. Returns false if any element equals
// neither value.
template <class T>
inline bool pack_block(const T* from, T first, T second, uint64_t& bits) {
  uint8_t is_other[kBitsBlock];
  T neither = 0;
  for (int i = 0; i < kBitsBlock; ++i) {
    is_other[i] = from[i] != first;
    neither |= static_cast<T>(from[i] != first && from[i] != second);
  }
  bits = 0;
  uint64_t eight;
  for (int i = 0; i < kBitsBlock; i += 8) {
    std::memcpy(&eight, is_other + i, sizeof eight);
    bits |= static_cast<uint64_t>(bits_of_bools(eight)) << i;
  }
  return neither == 0;
}

template <class T>
bool pack_elements(const T* from, int64_t begin, int64_t end, const TwoValues& values, uint8_t* to) {
  const T first = static_cast<T>(values.bits[0]), second = static_cast<T>(values.bits[1]);
  uint64_t bits = 0;
  int64_t i = begin;
  for (; i + kBitsBlock <= end; i += kBitsBlock) {
    if (!pack_block(from + i, first, second, bits)) return false;
    std::memcpy(to + i / 8, &bits, sizeof bits);
  }
  if (i < end) {
    T rest[kBitsBlock];
    for (int64_t k = 0; k < kBitsBlock; ++k) rest[k] = i + k < end ? from[i + k] : first;
    if (!pack_block(rest, first, second, bits)) return false;
    std::memcpy(to + i / 8, &bits, (end - i + 7) / 8);
  }
  return true;
}

template <class T>
inline void unpack_block(uint64_t bits, T first, T second, T* to) {
  uint8_t is_second[kBitsBlock];
  for (int i = 0; i < kBitsBlock; i += 8) {
    const uint64_t eight = bools_of_bits(static_cast<uint8_t>(bits >> i));
    std::memcpy(is_second + i, &eight, sizeof eight);
  }
  const T difference = first ^ second;
  for (int i = 0; i < kBitsBlock; ++i) to[i] = first ^ (static_cast<T>(-is_second[i]) & difference);
}

template <class T>
void unpack_elements(const uint8_t* from, const TwoValues& values, int64_t begin, int64_t end, T* to) {
  const T first = static_cast<T>(values.bits[0]), second = static_cast<T>(values.bits[1]);
  uint64_t bits = 0;
  int64_t i = begin;
  for (; i + kBitsBlock <= end; i += kBitsBlock) {
    std::memcpy(&bits, from + i / 8, sizeof bits);
    unpack_block(bits, first, second, to + i);
  }
  if (i < end) {
    T rest[kBitsBlock];
    bits = 0;
    std::memcpy(&bits, from + i / 8, (end - i + 7) / 8);
    unpack_block(bits, first, second, rest);
    std::memcpy(to + i, rest, (end - i) * sizeof(T));
  }
}

// Calls function(T()) with the unsigned integer type of that size.
template <class Function>
auto with_element(int size, const Function& function) {
  switch (size) {
    case 1:
      return function(uint8_t());
    case 2:
      return function(uint16_t());
    case 4:
      return function(uint32_t());
    default:
      return function(uint64_t());
  }
}

}  // namespace

bool pack_bits_cpu(const void* from, int element_size, int64_t begin, int64_t end, const TwoValues& values,
                   uint8_t* to) {
  return with_element(element_size, [&](auto element) {
    return pack_elements(static_cast<const decltype(element)*>(from), begin, end, values, to);
  });
}

void unpack_bits_cpu(const uint8_t* from, const TwoValues& values, int element_size, int64_t begin, int64_t end,
                     void* to) {
  with_element(element_size,
               [&](auto element) { unpack_elements(from, values, begin, end, static_cast<decltype(element)*>(to)); });
}

}  // namespace drivetrain::saved_tensors::DRIVETRAIN_ISA
