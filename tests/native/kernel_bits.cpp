// Prints a hash of the sums of ranks and of float8 on the wire for each instruction set, from inputs made of integers,
// so that tests/aarch64 can compare processors.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/cpu_isa.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/torch/float8_wire.h"
#include "formats/storage.h"

namespace {

using namespace drivetrain;
using ddp::ElementType;

constexpr int kRanks = 3;
constexpr int64_t kNumel = 2050;

uint64_t draw(int rank, int64_t index) { return formats::mixed(static_cast<uint64_t>(rank) << 32 | index); }

// Sets the exponent to one of 16 around that of 1, with the largest and the smallest exponent now and then. NaN is left
// out: its bits depend on the processor.
uint64_t with_exponent(uint64_t bits, int64_t index, int mantissa_bits, int exponent_bits) {
  const uint64_t most = (uint64_t{1} << exponent_bits) - 1, place = uint64_t{1} << mantissa_bits;
  const uint64_t exponent = index % 61 == 7 ? 0 : index % 61 == 9 ? most - 1 : most / 2 - 8 + (bits >> 40) % 16;
  const uint64_t sign = (bits >> 63) << (mantissa_bits + exponent_bits);
  return sign | exponent * place | (bits & (place - 1));
}

uint64_t element(ElementType type, int rank, int64_t index) {
  const uint64_t bits = draw(rank, index);
  switch (type) {
    case ElementType::kFloat32:
      return with_exponent(bits, index, 23, 8);
    case ElementType::kFloat64:
      return with_exponent(bits, index, 52, 11);
    case ElementType::kBFloat16:
      return with_exponent(bits, index, 7, 8);
    case ElementType::kFloat16:
      return with_exponent(bits, index, 10, 5);
    default:
      return bits;
  }
}

uint64_t hash(const char* bytes, size_t size) {
  uint64_t found = size;
  for (size_t i = 0; i < size; ++i) found = formats::mixed(found ^ static_cast<unsigned char>(bytes[i]));
  return found;
}

struct Values {
  explicit Values(ElementType type) : element_bytes(ddp::bytes_of(type)) {
    for (int rank = 0; rank < kRanks; ++rank) {
      memory[rank].resize(kNumel * 8);
      pointers[rank] = memory[rank].data();
      for (int64_t i = 0; i < kNumel; ++i) {
        const uint64_t value = element(type, rank, i);
        std::memcpy(memory[rank].data() + i * element_bytes, &value, element_bytes);
      }
    }
  }
  int64_t element_bytes;
  std::array<std::vector<char>, kRanks> memory;
  std::array<char*, kRanks> pointers;
};

}  // namespace

int main() {
  for (const Isa isa : available_isas()) {
    for (const double scale : {1.0, 1.0 / kRanks}) {
      for (int type = 0; type <= static_cast<int>(ElementType::kInt64); ++type) {
        Values values(static_cast<ElementType>(type));
        char* const* const ranks = values.pointers.data();
        const auto sum_range = for_isa(isa, DT_BY_ISA(ddp, sum_range));
        sum_range({static_cast<ElementType>(type), static_cast<ElementType>(type), ranks, kRanks, ranks, 1, 0, kNumel,
                   scale});
        std::printf("%s\t%016lx\tsum, type %d, scale %g\n", name_of(isa), hash(ranks[0], kNumel * values.element_bytes),
                    type, scale);
      }
    }
    Values values(ElementType::kFloat32);
    std::vector<float> errors(kNumel);
    std::vector<uint8_t> wire(kNumel + kNumel / ddp::kFloat8Block + 1);
    const auto float8 = for_isa(isa, DT_BY_ISA(ddp, float8_wire))();
    for (const char* const input : values.pointers) {
      float8.encode(reinterpret_cast<const float*>(input), errors.data(), kNumel, wire.data());
    }
    std::printf("%s\t%016lx\tfloat8 on the wire\n", name_of(isa),
                hash(reinterpret_cast<const char*>(wire.data()), wire.size()));
  }
  return 0;
}
