// Declares CRC32C (Castagnoli), alone and fused with a copy; equal on every instruction set. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"

namespace drivetrain::checkpointing {

// Extends the checksum of earlier bytes, 0 for none, by these bytes: crc32c(0, "123456789", 9) == 0xE3069283.
uint32_t crc32c(uint32_t checksum, const void* bytes, int64_t size);

// Copies the bytes and extends the checksum by the copy, so that it holds for what is written even if the source
// changes meanwhile. Large copies bypass the caches: the training needs them, and a disk reads the copy next.
uint32_t copy_crc32c(uint32_t checksum, void* to, const void* from, int64_t size);

// Compiled once per instruction set. Only those with SSE4.2 use its instruction.
DT_PER_ISA(uint32_t crc32c_cpu(uint32_t checksum, const unsigned char* bytes, int64_t size))
DT_PER_ISA(uint32_t copy_crc32c_cpu(uint32_t checksum, unsigned char* to, const unsigned char* from, int64_t size))

}  // namespace drivetrain::checkpointing
