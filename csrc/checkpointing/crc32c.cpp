// Chooses the copy of CRC32C for this processor, and fuses it with memory copies.
#include "checkpointing/crc32c.h"

#include <algorithm>
#include <cstring>

#include "base/cpu_isa.h"

namespace drivetrain::checkpointing {
namespace {

constexpr int64_t kBlock = 12 << 10;  // a block is still in the first-level cache when its checksum is computed

}  // namespace

uint32_t crc32c(uint32_t checksum, const void* bytes, int64_t size) {
  const auto extend = for_chosen_isa(baseline::crc32c_cpu, avx2::crc32c_cpu, avx512::crc32c_cpu);
  return extend(checksum, static_cast<const unsigned char*>(bytes), size);
}

uint32_t copy_crc32c(uint32_t checksum, void* to, const void* from, int64_t size) {
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  for (int64_t at = 0; at < size; at += kBlock) {
    const int64_t count = std::min(kBlock, size - at);
    std::memcpy(target + at, source + at, count);
    // The checksum is of the copy, so that it holds for what is written even if the source changes meanwhile.
    checksum = crc32c(checksum, target + at, count);
  }
  return checksum;
}

}  // namespace drivetrain::checkpointing
