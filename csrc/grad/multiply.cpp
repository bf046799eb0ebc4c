// Runs passes over gradients chunk by chunk on all threads; see multiply.h.
#include "grad/multiply.h"

#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/cpu_isa.h"
#include "base/parallel.h"
#include "grad/chunks.h"

namespace drivetrain::grad {

bool multiply(const std::vector<Gradient>& gradients, const formats::Factors& factors) {
  const auto multiply_chunk = for_chosen_isa(baseline::multiply_cpu, avx2::multiply_cpu, avx512::multiply_cpu);
  const std::vector<GradientChunk> chunks = chunks_of(gradients);
  std::atomic<bool> finite{true};
  parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    bool all = true;
    for (int64_t i = begin; i < end; ++i) {
      all &= multiply_chunk(*chunks[i].values, chunks[i].begin, chunks[i].end, factors);
    }
    if (!all) finite = false;
  });
  return finite;
}

bool all_finite(const std::vector<Gradient>& gradients) { return multiply(gradients, {}); }

namespace {

// Zeroes memory without reading it into the cache first, which takes half the time. `is_streamed` is for memory that
// would not stay in the cache anyway.
void zero_bytes(char* data, int64_t bytes, bool is_streamed) {
  constexpr int64_t kLine = 64;
  const int64_t head = std::min<int64_t>(bytes, (kLine - reinterpret_cast<intptr_t>(data) % kLine) % kLine);
  const int64_t whole = is_streamed ? (bytes - head) / kLine * kLine : 0;
  std::memset(data, 0, is_streamed ? head : bytes);
  if (!is_streamed) return;
  for (char* at = data + head; at < data + head + whole; at += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at), _mm_setzero_si128());
  }
  std::memset(data + head + whole, 0, bytes - head - whole);
  _mm_sfence();  // Other threads must not see the memory as it was before.
}

}  // namespace

void zero(const std::vector<Gradient>& gradients) {
  const std::vector<GradientChunk> chunks = chunks_of(gradients);
  constexpr int64_t kCached = int64_t{32} << 20;  // bytes that a cache may keep until the next backward pass
  int64_t total = 0;
  for (const Gradient& gradient : gradients) total += gradient.numel * formats::bytes_of(gradient.values.format);
  parallel_for(0, static_cast<int64_t>(chunks.size()), kChunksPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t width = formats::bytes_of(chunks[i].values->format);
      zero_bytes(static_cast<char*>(chunks[i].values->data) + chunks[i].begin * width,
                 (chunks[i].end - chunks[i].begin) * width, total > kCached);
    }
  });
}

}  // namespace drivetrain::grad
