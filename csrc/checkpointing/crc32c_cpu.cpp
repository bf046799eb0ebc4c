// Computes CRC32C. It is compiled once per instruction set, which DRIVETRAIN_ISA names, and includes no torch header.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "checkpointing/crc32c.h"

#if defined(__SSE4_2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace drivetrain::checkpointing::DRIVETRAIN_ISA {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

using Table = std::array<uint32_t, 256>;

constexpr Table byte_table() {
  Table table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? kPolynomial : 0);
    table[byte] = state;
  }
  return table;
}

#if defined(__SSE4_2__) || defined(__ARM_FEATURE_CRC32)

#if defined(__SSE4_2__)
uint64_t extend_word(uint64_t state, uint64_t word) { return _mm_crc32_u64(state, word); }
uint32_t extend_byte(uint32_t state, unsigned char byte) { return _mm_crc32_u8(state, byte); }
#else
uint64_t extend_word(uint64_t state, uint64_t word) { return __crc32cd(static_cast<uint32_t>(state), word); }
uint32_t extend_byte(uint32_t state, unsigned char byte) { return __crc32cb(state, byte); }
#endif

// The instruction has a latency of three cycles and a throughput of one, so three lanes run at once. Before lanes are
// joined, the state of the left one is advanced over as many zero bytes as the right one has.
constexpr int64_t kLane = 1024;

constexpr std::array<Table, 4> lane_tables() {
  const Table step = byte_table();
  std::array<uint32_t, 32> bits = {};
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t state = uint32_t{1} << bit;
    for (int64_t i = 0; i < kLane; ++i) state = (state >> 8) ^ step[state & 0xFF];
    bits[bit] = state;
  }
  std::array<Table, 4> tables = {};
  for (int at = 0; at < 4; ++at) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (int bit = 0; bit < 8; ++bit) {
        if ((byte >> bit & 1) != 0) tables[at][byte] ^= bits[8 * at + bit];
      }
    }
  }
  return tables;
}

constexpr std::array<Table, 4> kOverLane = lane_tables();

uint32_t over_lane(uint64_t state) {
  return kOverLane[0][state & 0xFF] ^ kOverLane[1][state >> 8 & 0xFF] ^ kOverLane[2][state >> 16 & 0xFF] ^
         kOverLane[3][state >> 24 & 0xFF];
}

uint64_t word_at(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 6 * kLane;  // the processor does not foresee three lanes, so that lines are asked for early

// Extends the state by `size` bytes, a multiple of three lanes. line_at(lane, at) returns the line at an offset.
template <typename LineAt>
uint32_t extend_lanes(uint32_t state, int64_t size, LineAt line_at) {
  uint64_t first = state;
  for (int64_t begin = 0; begin < size; begin += 3 * kLane) {
    uint64_t second = 0, third = 0;
    for (int64_t at = begin; at < begin + kLane; at += kLine) {
      const unsigned char* const one = line_at(0, at);
      const unsigned char* const two = line_at(1, at + kLane);
      const unsigned char* const three = line_at(2, at + 2 * kLane);
      for (int64_t i = 0; i < kLine; i += 8) {
        first = extend_word(first, word_at(one + i));
        second = extend_word(second, word_at(two + i));
        third = extend_word(third, word_at(three + i));
      }
    }
    first = over_lane(first) ^ second;
    first = over_lane(first) ^ third;
  }
  return static_cast<uint32_t>(first);
}

void prefetch(const unsigned char* line) { __builtin_prefetch(line + kAhead); }  // beyond the end it does nothing

uint32_t extend(uint32_t state, const unsigned char* bytes, int64_t size) {
  const int64_t in_lanes = size - size % (3 * kLane);
  state = extend_lanes(state, in_lanes, [bytes](int64_t, int64_t at) {
    prefetch(bytes + at);
    return bytes + at;
  });
  uint64_t last = state;
  int64_t at = in_lanes;
  for (; at + 8 <= size; at += 8) last = extend_word(last, word_at(bytes + at));
  for (; at < size; ++at) last = extend_byte(static_cast<uint32_t>(last), bytes[at]);
  return static_cast<uint32_t>(last);
}

// Both are multiples of a line. A streaming store does not read the target's line first.
void stream_line(unsigned char* to, const unsigned char* line) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(line));
#elif defined(__ARM_FEATURE_CRC32)
  std::memcpy(to, line, kLine);  // such processors recognize that whole lines are written
#else
  for (int64_t i = 0; i < kLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(line + i)));
  }
#endif
}

uint32_t copy_small(uint32_t state, unsigned char* to, const unsigned char* from, int64_t size) {
  if (size > 0) std::memcpy(to, from, size);  // an empty tensor may have no memory
  return extend(state, to, size);
}

uint32_t copy_and_extend(uint32_t state, unsigned char* to, const unsigned char* from, int64_t size) {
  const int64_t head = std::min(-reinterpret_cast<intptr_t>(to) & (kLine - 1), size);
  state = copy_small(state, to, from, head);
  to += head, from += head, size -= head;
  const int64_t in_lanes = size - size % (3 * kLane);
  alignas(kLine) unsigned char lines[3][kLine];
  state = extend_lanes(state, in_lanes, [&](int64_t lane, int64_t at) {
    prefetch(from + at);
    std::memcpy(lines[lane], from + at, kLine);
    std::atomic_signal_fence(std::memory_order_seq_cst);  // no second read of the source, see copy_crc32c
    stream_line(to + at, lines[lane]);
    return lines[lane];
  });
#if defined(__SSE4_2__)
  _mm_sfence();  // the thread that writes the file must see the copy
#endif
  return copy_small(state, to + in_lanes, from + in_lanes, size - in_lanes);
}

#else

// Table k holds the state after a byte and k zero bytes, so that eight bytes need eight independent lookups.
constexpr std::array<Table, 8> slice_tables() {
  std::array<Table, 8> tables = {byte_table()};
  for (int k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t state = tables[k - 1][byte];
      tables[k][byte] = (state >> 8) ^ tables[0][state & 0xFF];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kSlices = slice_tables();

uint32_t extend(uint32_t state, const unsigned char* bytes, int64_t size) {
  for (; size >= 8; size -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= kSlices[7 - k][word >> 8 * k & 0xFF];
  }
  for (; size > 0; --size, ++bytes) state = (state >> 8) ^ kSlices[0][(state ^ *bytes) & 0xFF];
  return state;
}

constexpr int64_t kBlock = 12 << 10;  // a block is still in the first-level cache when its checksum is computed

uint32_t copy_and_extend(uint32_t state, unsigned char* to, const unsigned char* from, int64_t size) {
  for (int64_t at = 0; at < size; at += kBlock) {
    const int64_t count = std::min(kBlock, size - at);
    std::memcpy(to + at, from + at, count);
    state = extend(state, to + at, count);
  }
  return state;
}

#endif

}  // namespace

uint32_t crc32c_cpu(uint32_t checksum, const unsigned char* bytes, int64_t size) {
  return ~extend(~checksum, bytes, size);
}

uint32_t copy_crc32c_cpu(uint32_t checksum, unsigned char* to, const unsigned char* from, int64_t size) {
  return ~copy_and_extend(~checksum, to, from, size);
}

}  // namespace drivetrain::checkpointing::DRIVETRAIN_ISA
