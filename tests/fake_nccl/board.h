// Declares the memory that the ranks of a fake communicator share: a file in /dev/shm that each of them maps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_nccl {

constexpr int kMaxRanks = 8;
constexpr size_t kChunk = 1 << 20;
constexpr size_t kMailChunk = 1 << 18;

// A channel from one rank to another.
struct Mail {
  std::atomic<int64_t> sent;
  std::atomic<int64_t> taken;
  int64_t what[3];  // count, type and chunk of what was sent
  char values[kMailChunk];
};

// The layout of the shared file. ftruncate zeroes it.
struct Board {
  std::atomic<int> joined;
  std::atomic<int64_t> met;      // counts calls that every rank makes, such as a window's registration
  std::atomic<int64_t> arrived;  // counts arrivals at the barriers of collectives
  std::atomic<int> processes[kMaxRanks];
  char gpus[kMaxRanks][128];  // host and bus of each rank's GPU; empty if unknown
  int colors[kMaxRanks];
  int keys[kMaxRanks];
  int64_t what[kMaxRanks][7];
  char values[kMaxRanks][kChunk];
  Mail mail[kMaxRanks][kMaxRanks];
};

// Maps the file of that name and creates it if needed. Returns null if the system refuses.
Board* open_board(const std::string& path);
void close_board(Board* board);

// Returns the first of `size` ranks whose process has ended without leaving the communicator, or -1 if there is none.
int lost_rank(const Board& board, int size);

}  // namespace fake_nccl
