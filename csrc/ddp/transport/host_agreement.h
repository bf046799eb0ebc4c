// Declares how hosts agree on their next collectives before anything of them is summed. Needs no torch header.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace drivetrain::ddp {

// Two ranks whose collectives do not belong together, with the words of their tags.
struct TagDifference {
  uint64_t rank = 0, word = 0, other_rank = 0, other_word = 0;  // ranks of the process group
};

// The message of a host in a round.
struct HostMessage {
  enum Kind : uint64_t {
    kAsks = 1,  // is about to start collectives, and starts none before all hosts agree
    kWaits,     // waits in a collective that it has started
    kDiffers,   // has ranks that differ from each other
  };
  uint64_t kind = 0;
  uint64_t number = 0;            // of the first collective that it asks for, or of the last one that it has started
  uint64_t word = 0;              // of the tag of the first collective
  uint64_t count = 0;             // of collectives
  uint64_t digest = 0;            // of all words
  TagDifference difference = {};  // of kDiffers
};

// Exchanges messages between the hosts' first ranks. Every host must start the same number of rounds.
class HostExchange {
 public:
  class Round {
   public:
    virtual ~Round() = default;
    // Waits for about that long at most. Returns true if the round has ended. May throw the connection's error.
    virtual bool wait_for(std::chrono::milliseconds limit) = 0;
    // Returns the messages by host, after the end. Throws the connection's error.
    virtual std::vector<HostMessage> received() const = 0;
  };
  virtual ~HostExchange() = default;
  virtual std::shared_ptr<Round> start(const HostMessage& mine) = 0;
};

// Takes part in rounds for a host. A host asks for one or several collectives, and starts them once all hosts have
// asked for the same in one round. If they differ behind the first collective, they agree on that one alone, and ask
// again for each of the others. A host that waits long in a collective takes part in a round as well, and says so. It
// then sees a host that asks for something else in the place of what it has started, instead of waiting for it in vain.
//
// All hosts see the same messages, and draw the same conclusion from them. Not thread safe, except as stated.
class HostAgreement {
 public:
  // ranks: each host's first rank, numbered as in the process group.
  HostAgreement(std::unique_ptr<HostExchange> exchange, std::vector<uint64_t> ranks);

  // Asks for collectives, numbered from `number`. Does not wait.
  void ask(uint64_t number, std::vector<uint64_t> words);
  // Returns true if all hosts agree on everything that was asked for.
  bool is_settled() const { return asked_.empty(); }
  // Takes part in a round as a host that has started all collectives up to that number, if none is in progress.
  void say_that_it_waits(uint64_t started);
  // Tells the other hosts of a difference, for as long as kLongestTale.
  void tell(const TagDifference& difference);
  // Returns the current round, for a wait outside of any lock; null if there is none.
  std::shared_ptr<HostExchange::Round> round() const { return round_; }
  // Takes the results of a round that has ended, and starts the next one if something is still asked for. Collects
  // what was agreed on in `agreed`. Throws the connection's error, now and then in every call.
  struct Agreed {
    uint64_t number = 0;
    std::vector<uint64_t> words;  // the first one alone, if the hosts differ in a later one
  };
  std::optional<TagDifference> advance(std::vector<Agreed>& agreed);

 private:
  static constexpr std::chrono::seconds kBetweenWaits{1};
  static constexpr std::chrono::seconds kLongestTale{3};

  void start(const HostMessage& message);
  bool has_ended(std::chrono::milliseconds limit);
  std::optional<TagDifference> compare(const std::vector<HostMessage>& messages) const;
  void remember(const Agreed& agreed);

  const std::unique_ptr<HostExchange> exchange_;
  const std::vector<uint64_t> ranks_;
  std::shared_ptr<HostExchange::Round> round_;
  bool has_asked_ = false;  // in the current round
  std::deque<Agreed> asked_;
  std::unordered_map<uint64_t, uint64_t> agreed_words_;  // by number; the last kRemembered
  std::chrono::steady_clock::time_point last_wait_;      // when a round of a waiting host has ended
  std::string error_;                                    // set: a connection has failed
};

}  // namespace drivetrain::ddp
