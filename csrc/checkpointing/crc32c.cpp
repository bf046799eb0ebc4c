// Chooses the CRC32C for this processor, alone and fused with a copy.
#include "checkpointing/crc32c.h"

#include "base/cpu_isa.h"

namespace drivetrain::checkpointing {

uint32_t crc32c(uint32_t checksum, const void* bytes, int64_t size) {
  const auto extend = for_chosen_isa(DT_BY_ISA(checkpointing, crc32c_cpu));
  return extend(checksum, static_cast<const unsigned char*>(bytes), size);
}

uint32_t copy_crc32c(uint32_t checksum, void* to, const void* from, int64_t size) {
  const auto copy = for_chosen_isa(DT_BY_ISA(checkpointing, copy_crc32c_cpu));
  return copy(checksum, static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), size);
}

}  // namespace drivetrain::checkpointing
