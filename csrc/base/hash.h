// 64-bit hashes of bytes: the same on every instruction set and any number of threads. Needs no torch header.
#pragma once

#include <cstdint>

namespace drivetrain {

#if defined(DRIVETRAIN_ISA)
inline namespace DRIVETRAIN_ISA {  // as in formats/storage.h
#endif

// Multiplies by an odd number and shifts: one-to-one in either argument, so that where all but one word agree, a hash
// differs for certain.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

#if defined(DRIVETRAIN_ISA)
}
#endif

constexpr int64_t kHashChunk = 1 << 20;  // bytes that one thread hashes at a time

uint64_t hash_bytes(const void* bytes, int64_t size);

// Of one chunk. One copy per instruction set.
namespace baseline {
uint64_t hash_chunk_cpu(const unsigned char* bytes, int64_t size);
}
namespace avx2 {
uint64_t hash_chunk_cpu(const unsigned char* bytes, int64_t size);
}
namespace avx512 {
uint64_t hash_chunk_cpu(const unsigned char* bytes, int64_t size);
}

}  // namespace drivetrain
