// Tests float8 on the wire without torch: every instruction set against a reference in double, in blocks of exactly the
// size needed and in place, and the errors that are carried from one transfer to the next.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "ddp/transport/torch/float8_wire.h"
#include "ddp/transport/torch/wire_format.h"
#include "formats/storage.h"
#include "native_tests.h"

namespace drivetrain {
namespace {

using ddp::Float8Wire;

Float8Wire wire_of(Isa isa) { return for_isa(isa, DT_BY_ISA(ddp, float8_wire))(); }

// Rounds one value of a block with that exponent on the wire.
float rounded(float value, int exponent) {
  if (!std::isfinite(value)) return value;
  const double scaled = std::ldexp(std::fabs(static_cast<double>(value)), 141 - exponent);
  const int last = scaled > 0 ? std::max(std::ilogb(scaled) - 2, -16) : -16;
  const double nearest = std::ldexp(std::nearbyint(std::ldexp(scaled, -last)), last + exponent - 141);
  return static_cast<float>(std::copysign(nearest, value));
}

// Returns what arrives of the values, and replaces errors unless they are empty.
std::vector<float> reference(std::vector<float> values, std::vector<float>& errors) {
  for (size_t i = 0; i < errors.size(); ++i) values[i] += errors[i];
  std::vector<float> result(values.size());
  for (size_t begin = 0; begin < values.size(); begin += ddp::kFloat8Block) {
    const size_t end = std::min<size_t>(begin + ddp::kFloat8Block, values.size());
    int exponent = ddp::kLeastExponent;
    for (size_t i = begin; i < end; ++i) {
      if (std::isfinite(values[i]) && values[i] != 0) exponent = std::max(exponent, std::ilogb(values[i]) + 127);
    }
    for (size_t i = begin; i < end; ++i) result[i] = rounded(values[i], exponent);
  }
  for (size_t i = 0; i < errors.size(); ++i) {
    const float rest = values[i] - result[i];
    errors[i] = std::isfinite(rest) ? rest : 0;
  }
  return result;
}

bool are_same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return (std::isnan(x) && std::isnan(y)) || std::memcmp(&x, &y, sizeof(x)) == 0;
  });
}

// Values of all magnitudes in one block and the next, some of them not finite, subnormal or half way between numbers.
std::vector<float> values_of(int rank, int64_t numel) {
  const float special[] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 0x1p-149f, 1.125f, 1.375f, 3.4e38f, -0x1.cp127f};
  std::vector<float> values(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto random = static_cast<uint32_t>(formats::mixed(i * 7 + rank));
    const int range = i / ddp::kFloat8Block % 3 == 0 ? 250 : 20;
    values[i] =
        std::ldexp(static_cast<float>(random % 4001) - 2000, static_cast<int>(random >> 16) % range - range / 2);
    if (random % 97 == 0) values[i] = special[random / 97 % std::size(special)];
  }
  return values;
}

void test_float8(Isa isa, int64_t numel) {
  const Float8Wire wire = wire_of(isa);
  const std::string what = text(name_of(isa), ", ", numel, " values");
  const int64_t bytes = ddp::float8_wire_bytes(numel);
  constexpr int kRanks = 3;
  for (const bool carries : {false, true}) {
    std::vector<std::vector<float>> errors(kRanks + 1), expected_errors(kRanks + 1);
    if (carries) std::fill(errors.begin(), errors.end(), std::vector<float>(numel));
    expected_errors = errors;
    for (int step = 0; step < 3; ++step) {
      std::vector<std::vector<uint8_t>> pieces;
      std::vector<float> total;
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::vector<float> values = values_of(rank + step, numel);
        const std::vector<float> sent = reference(values, expected_errors[rank]);
        if (rank == 0) total = sent;
        for (int64_t i = 0; rank > 0 && i < numel; ++i) total[i] += sent[i];
        float* const rest = carries ? errors[rank].data() : nullptr;
        std::vector<uint8_t>& piece = pieces.emplace_back(bytes);
        if (rank == 0) {
          wire.encode(values.data(), rest, numel, piece.data());
        } else {  // in place, and back
          std::vector<float> memory = values;
          auto* const on_wire = reinterpret_cast<uint8_t*>(memory.data());
          wire.encode(memory.data(), rest, numel, on_wire);
          std::copy(on_wire, on_wire + bytes, piece.begin());
          wire.decode(on_wire, numel, memory.data());
          expect(are_same(memory, sent), what + ": in place");
        }
        std::vector<float> arrived(numel);
        wire.decode(piece.data(), numel, arrived.data());
        expect(are_same(arrived, sent), what + ": what is sent");
        expect(are_same(errors[rank], expected_errors[rank]), what + ": what is rounded off");
      }
      std::vector<uint8_t*> pointers;
      for (std::vector<uint8_t>& piece : pieces) pointers.push_back(piece.data());
      const std::vector<uint8_t> last = pieces[2];
      wire.sum(pointers.data(), kRanks, 2, carries ? errors[kRanks].data() : nullptr, numel);
      expect(pieces[1] == pieces[0], what + ": all outputs get the same sum");
      expect(pieces[2] == last, what + ": what is no output stays");
      std::vector<float> arrived(numel);
      wire.decode(pieces[1].data(), numel, arrived.data());
      expect(are_same(arrived, reference(total, expected_errors[kRanks])), what + ": the sum");
      expect(are_same(errors[kRanks], expected_errors[kRanks]), what + ": what is rounded off the sum");
    }
  }
}

void test_carried_errors() {
  std::vector<float> memory(100);
  ddp::CarriedErrors errors(memory.data(), 90 * sizeof(float));
  float* const first = memory.data();
  expect(errors.covers(first, 90) && !errors.covers(first, 91) && !errors.covers(first + 89, 2), "memory has an end");
  const auto one = errors.of(first, 10, 3), two = errors.of(first + 10, 20, 7), three = errors.of(first + 40, 50, 9);
  expect(one->of_values.size() == 10 && one->of_sums.size() == 3, "every value and sum has an error");
  expect(errors.of(first, 10, 3) == one && errors.of(first + 10, 20, 7) == two && errors.of(first + 40, 50, 9) == three,
         "the same values have the same errors");
  const auto within = errors.of(first + 12, 4, 1);
  expect(errors.of(first, 10, 3) == one && errors.of(first + 12, 4, 1) == within, "others' errors stay");
  const auto again = errors.of(first + 10, 20, 7);
  expect(again != two && errors.of(first + 12, 4, 1) != within, "errors end where other bounds overlap");
  expect(
      errors.of(first + 5, 40, 2) != nullptr && errors.of(first, 10, 3) != one && errors.of(first + 40, 50, 9) != three,
      "a transfer ends the errors of all that it overlaps");
  expect(errors.of(first, 10, 4)->of_sums.size() == 4, "other pieces have other errors");
}

}  // namespace

void test_wire() {
  for (Isa isa : available_isas()) {
    for (int64_t numel : {0, 1, 2, 15, 255, 256, 257, 511, 1300}) test_float8(isa, numel);
  }
  test_carried_errors();
}

}  // namespace drivetrain
