// Declares the common part of reduce-scatters over a process group: an exchange of values, and one of sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/transport/torch/torch_group.h"

namespace drivetrain::ddp {

// Every rank sends each other rank the values that this one sums. A second exchange, in another group, brings sums to
// further ranks.
class TwoExchanges : public PendingReduce {
 public:
  // Returns whether the busiest rank sends and receives less than in an all-reduce of `whole`. This excludes that a
  // rank of a few rows gets the values of all others. Arguments, by rank: the amount that it sums, sends in the second
  // exchange, and takes from it.
  static bool pays(const std::vector<int64_t>& summed, const std::vector<int64_t>& sent_on,
                   const std::vector<int64_t>& taken, int64_t whole);

  bool is_done() override;
  void wait() override;
  bool wait_for(std::chrono::milliseconds limit) override;

 protected:
  // A part of an exchange. Ranks exchange lists of values.
  struct Message {
    std::unique_ptr<TorchReduce> work;
    at::Tensor received;          // uint8, what the ranks sent, by rank
    int64_t at;                   // where it begins in each list
    std::vector<int64_t> counts;  // received bytes, by rank
  };

  // returning: null if there is no second exchange.
  explicit TwoExchanges(std::shared_ptr<TorchComm> returning) : returning_(std::move(returning)) {}

  // pack(rank, to) writes the bytes for that rank.
  static Message start_message(TorchComm& comm, int64_t at, std::vector<int64_t> sent_counts,
                               std::vector<int64_t> received_counts, const std::function<void(int, char*)>& pack);

  // Sums the values of a message of the first exchange.
  virtual void sum(const Message& message) = 0;
  // Starts the second exchange.
  virtual std::deque<Message> start_back(TorchComm& comm) = 0;
  // Takes the sums that a message of it has brought.
  virtual void take(const Message& message) = 0;

  std::deque<Message> there_, back_;
  std::shared_ptr<TorchComm> returning_;  // null once the second exchange has begun
};

}  // namespace drivetrain::ddp
