// The protocol of the shared-memory transport: the ranks of one host add up their buckets together, without a helper
// thread. Needs no torch header.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/transport/rank_sum.h"
#include "ddp/transport/shm_residency.h"

namespace drivetrain::ddp {

struct Board;

// The way to the other hosts; only the first rank of a host has one.
class HostLink {
 public:
  virtual ~HostLink() = default;
  // Begins to add up the values of all hosts in place. Every host starts the same ones in the same order.
  virtual void start(char* values, ElementType type, int64_t numel) = 0;
  // Whether the oldest of those that were started is complete; forgets it then. Throws what went wrong.
  virtual bool finish_oldest() = 0;
};

// One rank's side. All ranks start the same operations in the same order; operation n is known by its number. What they
// share (the board, zeroed before its first use) holds for each rank how many operations it has published, and for each
// operation under way which chunks are the next to be added up and how many are done. Each rank has a region of
// chunks, which it takes first, so that in every step it touches the same part of the other ranks' memory; whoever has
// time then takes those of ranks that are late. A chunk's values of all ranks are added in rank order and written back
// to all ranks at once, so that all have the same bits, whoever computed. An operation's memory belongs to the ranks
// together from start() until wait() returns.
//
// With several hosts a chunk's sum goes to the host's first rank alone; that rank adds up the hosts through its link,
// and then the chunks are copied to the other ranks, again by whoever has time.
//
// Not thread safe: one call at a time.
class ShmExchange {
 public:
  struct Options {
    int rank = 0;  // within the host
    int size = 1;
    bool several_hosts = false;
    HostLink* link = nullptr;  // for the first rank, where there are several hosts
    std::chrono::nanoseconds timeout{0};
    bool spin = true;                                   // before sleeping; of use where every rank has a core
    std::vector<std::string> rank_names;                // for messages
    std::function<bool(int)> is_dead;                   // whether that rank's process has ended
    std::function<std::string(uint64_t)> describe_tag;  // for messages
  };

  struct Operation {
    std::vector<char*> values;  // every rank's, [size]
    ElementType type;
    int64_t numel = 0;
    double scale = 1;
    bool wants_square_sum = false;           // of floats, within one host
    uint64_t tag = 0;                        // what it is for; the same on all ranks
    std::shared_ptr<void> memory = nullptr;  // keeps the values mapped, until this rank has no part in it any more
    Residency* residency = nullptr;          // of the other ranks' values; null: not followed
    int64_t offset = 0;                      // of the values in what it follows, in bytes
  };

  static int64_t board_bytes(int size);
  ShmExchange(void* board, Options options);
  // The others learn that this rank takes no further part.
  ~ShmExchange();
  ShmExchange(const ShmExchange&) = delete;
  ShmExchange& operator=(const ShmExchange&) = delete;

  // Publishes this rank's values and does its share of what can be done without waiting. Returns the number.
  uint64_t start(Operation operation);
  // Until the operation is complete. Throws EnvironmentError, naming the ranks, when one has died or the timeout
  // passed.
  void wait(uint64_t number);
  // Whether wait() would end at once.
  bool is_done(uint64_t number) { return !failure_.empty() || is_forked() || is_complete(number); }
  // Of the result of a complete operation, if this rank wanted it and no operation before it is under way; the same on
  // all ranks. To be asked once.
  std::optional<double> take_square_sum(uint64_t number);

 private:
  struct Running {
    Operation operation;
    uint64_t number;
    uint32_t num_chunks;
    int64_t chunk_numel;
    int turn[2] = {0, 0};  // per stage: the ranks in turn, from this one on, all chunks of whose regions are taken
  };

  bool is_forked() const;
  void check_usable() const;
  bool is_complete(const Running& running) const;
  bool is_square_sum_wanted(const Running& running) const;
  void keep_square_sum(const Running& running);
  bool is_complete(uint64_t number);
  uint64_t published_by_all() const;
  bool work(uint32_t max_chunks);
  uint32_t region_begin(const Running& running, int rank) const;
  bool work_on(Running& running, int stage, uint32_t& max_chunks);
  void compare_kinds(const Running& running);
  std::string describe(uint64_t kind, uint64_t tag) const;
  void compute(const Running& running, int stage, uint32_t chunk, bool is_usual) const;
  bool relay();
  void announce();
  void spin_or_sleep(uint32_t event);
  void check_ranks(uint64_t number);
  [[noreturn]] void fail(const std::string& message);
  std::string missing_ranks(uint64_t number) const;

  Board& board_;
  const Options options_;
  const int last_stage_;
  const uint64_t creator_;  // the process, by its fork_depth(); a forked child has no part in the exchange
  uint64_t started_ = 0;
  std::deque<Running> running_;                          // not known to be complete, by number
  uint64_t compared_ = 0;                                // the last that is known to be the same on all ranks
  uint64_t relayed_ = 0;                                 // the last that went to the link
  std::deque<uint64_t> relaying_;                        // with the link
  std::deque<std::pair<uint64_t, double>> square_sums_;  // not taken yet
  std::string failure_;                                  // after which nothing works any more
};

}  // namespace drivetrain::ddp
