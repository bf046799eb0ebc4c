// Computes CRC32C. It is compiled once per instruction set, which DRIVETRAIN_ISA names, and includes no torch header.
#include <array>
#include <cstring>

#include "checkpointing/crc32c.h"

#if defined(__SSE4_2__)
#include <nmmintrin.h>
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

#if defined(__SSE4_2__)

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

uint32_t extend(uint32_t state, const unsigned char* bytes, int64_t size) {
  uint64_t first = state;
  for (; size >= 3 * kLane; size -= 3 * kLane, bytes += 3 * kLane) {
    uint64_t second = 0, third = 0;
    for (int64_t i = 0; i < kLane; i += 8) {
      first = _mm_crc32_u64(first, word_at(bytes + i));
      second = _mm_crc32_u64(second, word_at(bytes + kLane + i));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * kLane + i));
    }
    first = over_lane(first) ^ second;
    first = over_lane(first) ^ third;
  }
  for (; size >= 8; size -= 8, bytes += 8) first = _mm_crc32_u64(first, word_at(bytes));
  for (; size > 0; --size, ++bytes) first = _mm_crc32_u8(static_cast<uint32_t>(first), *bytes);
  return static_cast<uint32_t>(first);
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

#endif

}  // namespace

uint32_t crc32c_cpu(uint32_t checksum, const unsigned char* bytes, int64_t size) {
  return ~extend(~checksum, bytes, size);
}

}  // namespace drivetrain::checkpointing::DRIVETRAIN_ISA
