// Hashes chunks of bytes on all threads, then mixes the chunk hashes in order.
#include "base/hash.h"

#include <algorithm>
#include <vector>

#include "base/cpu_isa.h"
#include "base/parallel.h"

namespace drivetrain {

uint64_t hash_bytes(const void* bytes, int64_t size) {
  const auto hash_chunk = for_chosen_isa(DT_BY_ISA(drivetrain, hash_chunk_cpu));
  const auto* first = static_cast<const unsigned char*>(bytes);
  std::vector<uint64_t> hashes((size + kHashChunk - 1) / kHashChunk);
  parallel_for(0, static_cast<int64_t>(hashes.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      hashes[i] = hash_chunk(first + i * kHashChunk, std::min(kHashChunk, size - i * kHashChunk));
    }
  });
  uint64_t hash = size;
  for (const uint64_t of_chunk : hashes) hash = mix(hash, of_chunk);
  return hash;
}

}  // namespace drivetrain
