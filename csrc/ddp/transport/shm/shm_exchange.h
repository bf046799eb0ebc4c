// Declares the protocol by which the ranks of one host sum their buckets in shared memory, without a helper thread.
// Needs no torch header.
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

#include "ddp/transport/rank_ranges.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/shm/shm_residency.h"

namespace drivetrain::ddp {

struct SharedState;

// Operations on the values of all ranks.
enum class Exchange : uint8_t {
  kAllReduce,      // all ranks get the sum
  kReduceScatter,  // each rank gets the sum of its own ranges
  kGather,         // all ranks get each range's values from the rank that it belongs to; for one host
};

// Sums over hosts. Only the first rank of a host has a link.
class HostLink {
 public:
  virtual ~HostLink() = default;
  // Starts the sum of the values of all hosts, in place. Every host starts the same sums in the same order. ranges: the
  // part that each host needs of it; null: everything.
  virtual void start(char* values, ElementType type, int64_t numel,
                     const std::shared_ptr<const RankRanges>& ranges) = 0;
  // Returns true if the oldest sum is complete, and forgets it then. Throws its error.
  virtual bool finish_oldest() = 0;
};

// One rank's side of the protocol. All ranks start the same operations in the same order, and number them from 1. They
// share a state, zeroed before its first use. It holds the number of operations that each rank has published.
// For each operation in progress it holds the next chunk to be summed and the number of finished chunks.
//
// Each rank first takes the chunks of its own region, so that it touches the same part of the others' memory in
// every step. A rank with time left then takes chunks of late ranks. It adds a chunk's values in rank order and writes
// the sum to all ranks, so that all get the same bits whichever rank computes. From start() until wait() returns, the
// memory of an operation belongs to all ranks.
//
// With several hosts, a chunk's sum goes to the host's first rank only. That rank sums over hosts through its link.
// Then any rank with time left copies chunks to the other ranks.
//
// Invariant: all ranks of a host have the same operation under each number, or every call fails. Not thread safe: one
// call at a time.
class ShmExchange {
 public:
  struct Options {
    int rank = 0;  // within the host
    int size = 1;
    bool several_hosts = false;
    HostLink* link = nullptr;  // for the first rank, where there are several hosts
    std::chrono::nanoseconds timeout{0};
    bool spin = true;                     // before it sleeps; useful where every rank has a core
    bool in_tree = false;                 // sums in the order of a tree (SumJob)
    std::vector<std::string> rank_names;  // for messages
    std::function<bool(int)> is_dead;     // returns true if that rank's process has ended
  };

  struct Operation {
    std::vector<char*> values;  // by rank, [size]
    ElementType type;
    int64_t numel = 0;
    double scale = 1;
    std::optional<double> weight = std::nullopt;  // in place of the scale: the sum is divided by the sum of weights
    std::shared_ptr<void> memory = nullptr;       // keeps the values mapped while this rank takes part
    Residency* residency = nullptr;               // of the other ranks' values; null: not tracked
    int64_t offset = 0;                           // bytes from the start of the residency's memory
    Exchange exchange = Exchange::kAllReduce;
    // For exchanges other than all-reduces, with ranks numbered within the host; -1: on another host.
    std::shared_ptr<const RankRanges> ranges = nullptr;
    // For a reduce-scatter with several hosts, with numbers of hosts.
    std::shared_ptr<const RankRanges> host_ranges = nullptr;
  };

  static int64_t shared_state_bytes(int size);
  ShmExchange(void* block, Options options);
  // Tells the others that this rank takes no further part.
  ~ShmExchange();
  ShmExchange(const ShmExchange&) = delete;
  ShmExchange& operator=(const ShmExchange&) = delete;

  // Publishes this rank's values and does its share of the work that needs no waiting. Returns the operation's number.
  uint64_t start(Operation operation);
  // Waits until the operation is complete. Throws EnvironmentError, which names the ranks, if one has died or the
  // timeout has passed.
  void wait(uint64_t number) { wait_until(number, std::chrono::steady_clock::time_point::max()); }
  // Waits up to a deadline. Returns true if the operation is complete.
  bool wait_until(uint64_t number, std::chrono::steady_clock::time_point deadline);
  // Returns true if this rank has added up some of its own values there, in their last operation. False for several
  // hosts.
  bool has_summed(const char* begin, const char* end) const;
  // Returns true if wait() would end at once.
  bool is_done(uint64_t number) { return !failure_.empty() || is_forked() || is_complete(number); }

 private:
  struct Running {
    Operation operation;
    uint64_t number;
    uint32_t num_chunks;
    int64_t chunk_numel;
    int turn[2] = {0, 0};  // per stage: the number of ranks, from this one on, whose chunks are all taken
  };

  using Bytes = std::pair<const char*, const char*>;  // [begin, end)

  bool is_forked() const;
  void check_usable() const;
  bool is_complete(const Running& running) const;
  bool is_complete(uint64_t number);
  uint64_t published_by_all() const;
  bool work(uint32_t max_chunks);
  uint32_t region_begin(const Running& running, int rank) const;
  bool work_on(Running& running, int stage, uint32_t& max_chunks);
  void compare_kinds(const Running& running);
  double inverse_of_weights(uint64_t number) const;
  void compute(const Running& running, int stage, uint32_t chunk, bool is_usual);
  void compute_ranges(const Operation& operation, int stage, int64_t begin, int64_t end) const;
  bool relay();
  void announce();
  void spin_or_sleep(uint32_t event);
  void check_ranks(uint64_t number);
  [[noreturn]] void fail(const std::string& message);
  std::string missing_ranks(uint64_t number) const;

  SharedState& block_;
  const Options options_;
  const int last_stage_;
  const uint64_t creator_;  // fork_depth() of the process; a forked child takes no part
  uint64_t started_ = 0;
  uint64_t awaited_ = 0;  // the last operation that was waited for
  std::chrono::steady_clock::time_point awaited_since_;
  std::deque<Running> running_;    // operations not known to be complete, by number
  std::vector<Bytes> summed_;      // this rank's values that it has added up, until their next operation
  uint64_t compared_ = 0;          // the last operation that was compared over ranks
  uint64_t relayed_ = 0;           // the last operation that the link has started
  std::deque<uint64_t> relaying_;  // operations that the link has started and not finished
  std::string failure_;            // set: every call fails
};

}  // namespace drivetrain::ddp
