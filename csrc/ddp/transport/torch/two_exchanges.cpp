// Implements the common part of reduce-scatters over a process group.
#include "ddp/transport/torch/two_exchanges.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace drivetrain::ddp {

bool TwoExchanges::pays(const std::vector<int64_t>& summed, const std::vector<int64_t>& sent_on,
                        const std::vector<int64_t>& taken, int64_t whole) {
  const auto size = static_cast<int64_t>(summed.size());
  const int64_t all = std::accumulate(summed.begin(), summed.end(), int64_t{0});
  int64_t most = 0;
  for (int64_t rank = 0; rank < size; ++rank) {
    most = std::max({most, all - summed[rank] + sent_on[rank], (size - 1) * summed[rank] + taken[rank]});
  }
  return most * size < 2 * (size - 1) * whole;
}

TwoExchanges::Message TwoExchanges::start_message(TorchComm& comm, int64_t at, std::vector<int64_t> sent_counts,
                                                  std::vector<int64_t> received_counts,
                                                  const std::function<void(int, char*)>& pack) {
  const auto total = [](const std::vector<int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  const at::Tensor packed = at::empty({total(sent_counts)}, at::kByte);
  char* to = static_cast<char*>(packed.data_ptr());
  for (size_t rank = 0; rank < sent_counts.size(); ++rank) {
    pack(static_cast<int>(rank), to);
    to += sent_counts[rank];
  }
  Message message = {nullptr, at::empty({total(received_counts)}, at::kByte), at, received_counts};
  message.work = comm.start_all_to_all(message.received, packed, std::move(received_counts), std::move(sent_counts));
  return message;
}

bool TwoExchanges::is_done() {
  const auto has_arrived = [](const Message& message) { return message.work->is_done(); };
  return !returning_ && std::all_of(there_.begin(), there_.end(), has_arrived) &&
         std::all_of(back_.begin(), back_.end(), has_arrived);
}

// The process group ends its work within its timeout.
void TwoExchanges::wait() {
  while (!wait_for(std::chrono::hours(1))) {
  }
}

bool TwoExchanges::wait_for(std::chrono::milliseconds limit) {
  for (; !there_.empty(); there_.pop_front()) {
    if (!there_.front().work->wait_for(limit)) return false;
    sum(there_.front());
  }
  if (const std::shared_ptr<TorchComm> comm = std::move(returning_)) back_ = start_back(*comm);
  for (; !back_.empty(); back_.pop_front()) {
    if (!back_.front().work->wait_for(limit)) return false;
    take(back_.front());
  }
  return true;
}

}  // namespace drivetrain::ddp
