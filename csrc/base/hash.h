// Declares a 64-bit hash of bytes that is equal on every instruction set and thread count. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"

namespace drivetrain {

DT_BEGIN_ISA

constexpr uint64_t kOddFactor = 0x9E3779B97F4A7C15u;

// Multiplies by an odd number and shifts. This is one-to-one in either argument, so two inputs that differ in exactly
// one word have different hashes.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kOddFactor;
  return hash ^ (hash >> 29);
}

DT_END_ISA

constexpr int64_t kHashChunk = 1 << 20;  // bytes per chunk; one thread hashes a chunk

uint64_t hash_bytes(const void* bytes, int64_t size);

// Hashes one chunk; compiled once per instruction set.
DT_PER_ISA(uint64_t hash_chunk_cpu(const unsigned char* bytes, int64_t size))

}  // namespace drivetrain
