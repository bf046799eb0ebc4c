// What the ranks of a fake communicator share: a file in /dev/shm that each of them maps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fake_nccl {

constexpr int kMaxRanks = 8;
constexpr size_t kChunk = 1 << 20;
constexpr size_t kMailChunk = 1 << 18;

// From one rank to another.
struct Mail {
  std::atomic<int64_t> sent;
  std::atomic<int64_t> taken;
  char values[kMailChunk];
};

// Zeroed by ftruncate.
struct Board {
  std::atomic<int> joined;
  std::atomic<int64_t> met;      // calls that every rank makes, such as a window's registration
  std::atomic<int64_t> arrived;  // at the barriers of collectives
  std::atomic<int> processes[kMaxRanks];
  char gpus[kMaxRanks][128];  // host and bus of each rank's; empty: unknown
  int colors[kMaxRanks];
  int keys[kMaxRanks];
  int64_t what[kMaxRanks][7];
  char values[kMaxRanks][kChunk];
  Mail mail[kMaxRanks][kMaxRanks];
};

// Maps the file of that name, and makes it if it is not there. Null: the system refuses.
Board* open_board(const std::string& path);
void close_board(Board* board);

// The first rank of so many whose process has ended without leaving the communicator; -1: none.
int lost_rank(const Board& board, int size);

}  // namespace fake_nccl
