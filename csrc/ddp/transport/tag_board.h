// Declares tags, which name collectives, and the board on which ranks show each other which one they start next. Needs
// no torch header.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddp/transport/host_agreement.h"

namespace drivetrain::ddp {

enum class Purpose : uint8_t {
  kBucket = 1,
  kWeightedBucket,
  kHook,
  kUsedMap,
  kWeights,
  kReplicas,
  kPlan,
  kFromRank0,
  kBuffers,
  kAgreement,
  kUnpreparedBucket,  // of a backward that no forward has prepared, such as a second one over its outputs
  kUnpreparedHook,
  kGradientCheck,
  kGradientNoise,
  kChange,     // no collective: a parameter that a hook changed during backward, with its checksum in place of the step
  kConnection  // of a wrapper that did not communicate when it was made
};

// Identifies a collective within a job. Ranks give the parts of one collective the same tag.
struct Tag {
  Purpose purpose{};     // 0: unknown
  int64_t step = 0;      // synchronized, from 1
  uint64_t bucket = 0;   // of the purposes of buckets and hooks; the parameter's index for kChange
  uint64_t wrapper = 0;  // counts the wrappers of a process group

  // Packs the tag into a word. Larger numbers lose their high bits.
  uint64_t word() const;
  static Tag of(uint64_t word);
};

std::string describe(const Tag& tag);  // "bucket 3 in synchronized step 7"

// Returns the error of two ranks whose collectives do not belong together. Both are named and described by the caller.
std::string describe_difference(const std::string& rank, const std::string& what, const std::string& other_rank,
                                const std::string& other_what);

// Every rank has a line of memory, which the ranks of its host can read. Before it starts a collective, a rank writes
// the collective's tag into its line, and reads the others' tags under the same number. A collective cannot complete
// before its last rank starts it. If two ranks' tags differ, at least one sees the other's tag before it starts
// anything, and throws. Nothing that does not belong together is ever summed, whatever carries the values. The rank
// that started first learns of this from check(), as it waits.
//
// With several hosts, ranks start a collective once the first ranks of all hosts have agreed on it in one exchange of
// messages. A step's first gradient asks for all collectives of the step at once. The answer usually arrives before the
// first bucket is full.
//
// A line keeps the last kKept tags. A rank that is further behind than that compares nothing until it has caught up.
//
// Thread safe. Every rank must show the collectives of one process group and device in the same order.
class TagBoard {
 public:
  struct Options {
    int rank = 0;                         // within the host
    std::vector<char*> lines;             // by rank of the host: line_bytes() bytes, zeroed before their first use
    std::shared_ptr<void> memory;         // keeps the lines mapped
    std::vector<uint64_t> ranks;          // by rank of the host: the rank of the process group
    std::vector<std::string> rank_names;  // by rank of the process group, for messages
    std::unique_ptr<HostAgreement>
        agreement;                      // of the host's first rank with other hosts' first ranks; null on the others
    bool do_hosts_agree = false;        // before a collective starts
    std::chrono::milliseconds limit{};  // for the wait of the host's other ranks for its first one
    std::function<bool()> has_first_rank_ended;  // its process; needed on the host's other ranks if hosts agree
  };
  static constexpr uint64_t kKept = 1024;
  static constexpr uint64_t kLongestPromise = 512;  // collectives
  static int64_t line_bytes();

  explicit TagBoard(Options options);

  // Returns true if no rank of the process group is on another host.
  bool has_all_ranks() const { return options_.lines.size() == options_.rank_names.size(); }
  // Numbers a wrapper whose collectives are shown here. Ranks must add theirs in the same order.
  uint64_t add_wrapper(std::string name);
  // Says which collectives this rank is going to show next, so that hosts agree on them together. Does not wait, and
  // need not be kept.
  void promise(const std::vector<Tag>& tags);
  // Shows the tag of the collective that this rank starts next. Returns once all hosts agree on it. Throws
  // EnvironmentError if another rank has shown another one in its place, or if any two ranks have differed before.
  void show(const Tag& tag);
  // Returns how two ranks have differed, "" if none have.
  std::string difference();
  // Throws that difference, if there is one, as EnvironmentError.
  void check();
  // Does the same for a rank that has waited so long in a collective, and lets other hosts know that it waits.
  void check(std::chrono::milliseconds waited);

 private:
  struct Line;

  Line& line(size_t rank) const;
  bool is_first() const { return options_.rank == 0; }
  void throw_difference();
  void set_difference(const TagDifference& difference);
  void look_for_difference();
  void compare_on_host(uint64_t number, uint64_t word);
  // Takes the results of rounds. Returns the round to wait for; null: the hosts agree on all that was asked for. Throws
  // if a connection has failed, after it has notified the host's other ranks.
  std::shared_ptr<HostExchange::Round> advance();
  void agree(uint64_t number, uint64_t word, std::unique_lock<std::mutex>& lock);
  void wait_for_first_rank(uint64_t number, uint64_t word, std::unique_lock<std::mutex>& lock);
  std::string describe_shown(uint64_t word) const;

  const Options options_;
  const uint64_t creator_;  // fork_depth() of the process; a forked child takes no part
  std::mutex mutex_;        // guards the following
  uint64_t shown_ = 0, started_ = 0;
  std::deque<uint64_t> promised_;  // words of the following collectives, which the hosts were asked for
  std::vector<std::string> wrappers_;
  std::string difference_;      // set: every call fails
  bool do_hosts_know_ = false;  // of that difference
};

}  // namespace drivetrain::ddp
