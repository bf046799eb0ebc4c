// Tests packing into bits on every instruction set and on CUDA (cuda_on_cpu/), and compares CUDA conversions with the
// CPU's.
#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "native_tests.h"
#include "saved_tensors/bits.h"
#include "saved_tensors/pack_cuda.h"
#include "step_blocks.h"

namespace drivetrain {
namespace {

using Bytes = std::vector<unsigned char>;

const std::vector<int64_t> kSizes = {0, 1, 7, 8, 9, 63, 64, 65, 257, 1024, 1283, 8200, 20001, 33000};

bool draw(int64_t i) { return (formats::mixed(i) & 1) != 0; }

// Returns `numel` elements of `size` bytes, each with one of two values, in memory of exactly the size needed.
Bytes elements(int64_t numel, int size, const saved_tensors::TwoValues& values) {
  Bytes result(numel * size);
  for (int64_t i = 0; i < numel; ++i) std::memcpy(result.data() + i * size, &values.bits[i > 0 && draw(i)], size);
  return result;
}

void test_bits_of(int64_t numel, int size) {
  const uint64_t mask = size == 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * size) - 1;
  const saved_tensors::TwoValues values = {{0x8070605040302010u & mask, 0x8070605040302011u & mask}};
  const Bytes from = elements(numel, size, values);
  Bytes expected((numel + 7) / 8);
  for (int64_t i = 1; i < numel; ++i) expected[i / 8] |= draw(i) << i % 8;
  for (Isa isa : available_isas()) {
    const auto pack = for_isa(isa, DT_BY_ISA(saved_tensors, pack_bits_cpu));
    const auto unpack = for_isa(isa, DT_BY_ISA(saved_tensors, unpack_bits_cpu));
    const std::string name = text(numel, " elements of ", size, " bytes, ", name_of(isa));
    saved_tensors::TwoValues found = {{values.bits[0], values.bits[0]}};
    Bytes bits(expected.size()), back(from.size());
    expect(pack(from.data(), size, 0, numel, found, bits.data()) && bits == expected, text(name, ": bits"));
    expect(numel < 64 || found.bits[1] == values.bits[1], text(name, ": the second value"));
    unpack(bits.data(), found, size, 0, numel, back.data());
    expect(back == from, text(name, ": back"));
    if (numel < 64) continue;
    Bytes third = from;
    third.back() ^= 0x80;
    found = {{values.bits[0], values.bits[0]}};
    expect(!pack(third.data(), size, 0, numel, found, bits.data()), text(name, ": a third value"));
  }
}

void test_bools(int64_t numel, int64_t start) {
  const saved_tensors::TwoValues values = {{0, 1}};
  Bytes bools(start), expected((numel + 7) / 8), bits(expected.size()), back(start + numel);
  const Bytes drawn = elements(numel, 1, values);
  bools.insert(bools.end(), drawn.begin(), drawn.end());
  saved_tensors::TwoValues found = values;
  saved_tensors::baseline::pack_bits_cpu(drawn.data(), 1, 0, numel, found, expected.data());
  saved_tensors::pack_bools_cuda(bools.data() + start, numel, bits.data(), nullptr);
  expect(bits == expected, text("CUDA bits of ", numel, " bools from ", start, ": different from the CPU's"));
  saved_tensors::unpack_bools_cuda(bits.data(), numel, back.data() + start, nullptr);
  expect(back == bools, text("CUDA bools from bits, ", numel, " from ", start));
}

void test_bool_bytes() {
  for (int bits = 0; bits < 256; ++bits) {
    expect(saved_tensors::bits_of_bools(saved_tensors::bools_of_bits(bits)) == bits, "bits to bools and back");
    for (int place = 0; place < 8; ++place) {
      expect(saved_tensors::bits_of_bools(static_cast<uint64_t>(bits) << 8 * place) == (bits != 0) << place,
             "a bool that is not 0 counts as 1");
    }
  }
}

// `start` is the index of the first element within aligned memory.
void test_conversion(Format from_format, Format to_format, int64_t numel, int64_t start, bool is_finite) {
  const int64_t bytes = formats::bytes_of(from_format);
  Bytes values((numel + start) * bytes), scales(extra_bytes_of(from_format, numel));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<unsigned char>(formats::mixed(i));  // has NaN
  // The top exponent bit is cleared, so that every value is finite.
  for (size_t i = bytes - 1; is_finite && from_format != Format::kSigned8 && i < values.size(); i += bytes) {
    values[i] &= 0xbf;
  }
  if (!scales.empty()) {
    // A negative scale marks codes of non-finite values.
    const std::vector<float> units(scales.size() / sizeof(float), is_finite ? 0.37f : -0.37f);
    std::memcpy(scales.data(), units.data(), scales.size());
  }
  const formats::TypedArray from = {values.data() + start * bytes, from_format, scales.data()};
  Bytes expected(numel * formats::bytes_of(to_format)), expected_extra(extra_bytes_of(to_format, numel));
  Bytes found(expected.size()), found_extra(expected_extra.size());
  formats::baseline::convert_cpu(from, {expected.data(), to_format, expected_extra.data()}, numel, /*key=*/0);
  saved_tensors::convert_cuda(from, {found.data(), to_format, found_extra.data()}, numel, nullptr);
  expect(found == expected && found_extra == expected_extra,
         text("CUDA conversion of ", numel, " from element ", start, ", from format ", static_cast<int>(from_format),
              " into ", static_cast<int>(to_format), ": other bytes than the CPU"));
}

}  // namespace

void test_packing() {
  for (const int64_t numel : kSizes) {
    for (const int size : {1, 2, 4, 8}) test_bits_of(numel, size);
  }
  test_bool_bytes();
  for (const int seed : cuda_on_cpu::kSeeds) {
    cuda_on_cpu::set_seed(seed);
    for (const int64_t numel : kSizes) {
      for (const int64_t start : {0, 1, 4}) test_bools(numel, start);
      if (numel > 10000) continue;  // fibers are slow
      for (const int64_t start : {0, 1}) {
        for (const bool is_finite : {false, true}) {
          const auto test_both = [&](Format whole, Format part) {
            test_conversion(whole, part, numel, start, is_finite);
            test_conversion(part, whole, numel, start, is_finite);
          };
          for (const Format whole : {Format::kFloat32, Format::kBFloat16, Format::kFloat16}) {
            test_both(whole, Format::kSigned8);
          }
          for (const Format whole : {Format::kFloat32, Format::kFloat64}) test_both(whole, Format::kBFloat16);
        }
      }
    }
  }
}

}  // namespace drivetrain
