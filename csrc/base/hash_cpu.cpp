// Hashes one chunk. It is compiled once per instruction set, which DRIVETRAIN_ISA names, and includes no torch header.
#include <cstring>

#include "base/hash.h"

namespace drivetrain::DRIVETRAIN_ISA {
namespace {

constexpr int kLanes = 32;  // independent 64-bit hashes; each mixes every 32nd word

struct HashLanes {
  uint64_t words[kLanes];
};

}  // namespace

uint64_t hash_chunk_cpu(const unsigned char* bytes, int64_t size) {
  constexpr int64_t kStripe = sizeof(HashLanes);
  HashLanes lanes, stripe;
  for (int lane = 0; lane < kLanes; ++lane) lanes.words[lane] = lane;
  for (int64_t at = 0; at < size; at += kStripe) {
    const int64_t count = size - at < kStripe ? size - at : kStripe;
    if (count < kStripe) std::memset(&stripe, 0, sizeof stripe);
    std::memcpy(&stripe, bytes + at, count);
    for (int lane = 0; lane < kLanes; ++lane) lanes.words[lane] = mix(lanes.words[lane], stripe.words[lane]);
  }
  uint64_t hash = size;
  for (int lane = 0; lane < kLanes; ++lane) hash = mix(hash, lanes.words[lane]);
  return hash;
}

}  // namespace drivetrain::DRIVETRAIN_ISA
