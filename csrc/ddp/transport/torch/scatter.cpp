// Implements the common part of reduce-scatters over a process group.
#include "ddp/transport/torch/scatter.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

using Spans = ScatterPlan::Spans;

int64_t sum_of(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

int64_t values_in(const Spans& spans) {
  int64_t values = 0;
  for (const auto& span : spans) values += span.end - span.begin;
  return values;
}

// Adds a span that begins no earlier than those in the list.
void add_span(Spans& spans, const ScatterPlan::Span& span) {
  if (!spans.empty() && spans.back().piece == span.piece && span.begin <= spans.back().end) {
    spans.back().end = std::max(spans.back().end, span.end);
  } else {
    spans.push_back(span);
  }
}

// Divides values into whole blocks of pieces. Its calls must be in ascending order.
class Blocks {
 public:
  explicit Blocks(const ScatterPlan& plan) : pieces_(plan.pieces), block_(plan.block) {}

  template <class Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit) {
    while (piece_ < pieces_.size() && pieces_[piece_].end <= begin) ++piece_;
    for (size_t piece = piece_; piece < pieces_.size() && pieces_[piece].begin < end; ++piece) {
      const int64_t first = pieces_[piece].begin, last = pieces_[piece].end;
      const int64_t from = std::max(begin, first) - first, to = std::min(end, last) - first;
      if (from >= to) continue;
      const int64_t rounded_up = (to + block_ - 1) / block_ * block_;
      visit({first + from / block_ * block_, std::min(last, first + rounded_up), piece});
    }
  }

 private:
  const std::vector<ScatterPlan::Piece>& pieces_;
  const int64_t block_;
  size_t piece_ = 0;
};

}  // namespace

void ScatterPlan::assign(const RankRanges& ranges, int64_t element) {
  const int64_t numel = pieces.back().end;
  summed.resize(size);
  onwards.resize(size);
  from.resize(size);
  std::map<std::pair<int, int>, Spans> between;  // of the second exchange, by sender and receiver
  Blocks blocks(*this);
  int64_t done = 0;
  // Values of no range belong to all ranks.
  const auto add_gap = [&](int64_t end) {
    blocks.visit(done, end, [&](const Span& span) {
      for (Spans& spans : summed) add_span(spans, span);
    });
  };
  for (const RankRange& range : ranges) {
    const int64_t begin = range.begin / element, end = range.end / element;
    DT_INVARIANT(begin >= done && end >= begin && end <= numel);
    add_gap(begin);
    blocks.visit(begin, end, [&](const Span& span) {
      add_span(summed.at(range.rank), span);
      for (const int other : range.also) add_span(between[{range.rank, other}], span);
    });
    done = end;
  }
  add_gap(numel);

  const auto all_blocks = [this](const Spans& spans) {
    int64_t count = 0;
    for (const Span& span : spans) count += blocks_in(span);
    return count;
  };
  std::vector<int64_t> values, sent_on(size), taken(size);  // by rank
  for (const Spans& spans : summed) {
    values.push_back(values_in(spans));
    most = std::max(most, all_blocks(spans));
  }
  for (auto& [pair, spans] : between) {
    const auto [sender, receiver] = pair;
    sent_on.at(sender) += values_in(spans);
    taken.at(receiver) += values_in(spans);
    most_back = std::max(most_back, all_blocks(spans));
    if (sender == rank) onwards[receiver] = spans;
    if (receiver == rank) from[sender] = spans;
  }
  const int64_t all = sum_of(values);
  int64_t busiest = 0;
  for (int one = 0; one < size; ++one) {
    busiest = std::max({busiest, all - values[one] + sent_on[one], (size - 1) * values[one] + taken[one]});
  }
  pays = busiest * size < 2 * (size - 1) * numel;
}

Scatter::Scatter(ScatterPlan plan, int64_t most_values, std::shared_ptr<TorchComm> returning)
    : plan_(std::move(plan)),
      at_once_(most_values / plan_.block),
      returning_(plan_.most_back > 0 ? std::move(returning) : nullptr) {
  DT_INVARIANT(plan_.most_back == 0 || returning_);
}

void Scatter::start(TorchComm& group) {
  std::vector<Spans> sent = plan_.summed, received(plan_.size, plan_.summed[plan_.rank]);
  sent[plan_.rank].clear();
  received[plan_.rank].clear();
  for (int64_t at = 0; at < plan_.most; at += at_once_) {
    // One message is encoded while those before it are on their way.
    for (const Spans& spans : plan_.summed) {
      visit_message(spans, at, [&](const Span& span, int64_t, int64_t) { encode_once(span); });
    }
    there_.push_back(start_message(group, sent, received, at));
  }
}

// Calls visit(span, byte, value) for each part of a list that lies in the message which begins with block `at` of the
// list. `byte` is the part's first byte in the message, and `value` its first value in the list.
template <class Visit>
void Scatter::visit_message(const Spans& spans, int64_t at, Visit&& visit) const {
  const int64_t behind = at + at_once_;
  int64_t blocks = 0, values = 0, bytes = 0;  // before the span, in the list and in the message
  for (const Span& span : spans) {
    const int64_t count = plan_.blocks_in(span);
    const int64_t from = std::max<int64_t>(at - blocks, 0), to = std::min(behind - blocks, count);
    if (from < to) {
      const int64_t end = std::min(span.begin + to * plan_.block, span.end);
      const Span part = {span.begin + from * plan_.block, end, span.piece};
      visit(part, bytes, values + from * plan_.block);
      bytes += bytes_of_values(part.end - part.begin);
    }
    blocks += count;
    values += span.end - span.begin;
    if (blocks >= behind) return;
  }
}

int64_t Scatter::bytes_in_message(const Spans& spans, int64_t at) const {
  int64_t bytes = 0;
  visit_message(spans, at,
                [&](const Span& span, int64_t, int64_t) { bytes += bytes_of_values(span.end - span.begin); });
  return bytes;
}

// Starts the message that begins with that block of each list. sent: for each rank; received: from each rank.
Scatter::Message Scatter::start_message(TorchComm& comm, const std::vector<Spans>& sent,
                                        const std::vector<Spans>& received, int64_t at) const {
  std::vector<int64_t> sent_counts, counts;
  for (const Spans& spans : sent) sent_counts.push_back(bytes_in_message(spans, at));
  for (const Spans& spans : received) counts.push_back(bytes_in_message(spans, at));
  const at::Tensor packed = at::empty({sum_of(sent_counts)}, at::kByte);
  char* to = static_cast<char*>(packed.data_ptr());
  for (int rank = 0; rank < plan_.size; ++rank) {
    visit_message(sent[rank], at, [&](const Span& span, int64_t byte, int64_t) {
      std::memcpy(to + byte, wire(span), bytes_of_values(span.end - span.begin));
    });
    to += sent_counts[rank];
  }
  Message message = {nullptr, at::empty({sum_of(counts)}, at::kByte), at, counts};
  message.work = comm.start_all_to_all(message.received, packed, std::move(counts), std::move(sent_counts));
  return message;
}

void Scatter::sum_message(const Message& message) {
  char* const received = static_cast<char*>(message.received.data_ptr());
  const int64_t count = message.counts[plan_.rank == 0 ? 1 : 0];  // equal for all other ranks
  visit_message(plan_.summed[plan_.rank], message.at, [&](const Span& span, int64_t byte, int64_t before) {
    std::vector<char*> inputs;
    for (int rank = 0; rank < plan_.size; ++rank) {
      const int place = rank < plan_.rank ? rank : rank - 1;
      inputs.push_back(rank == plan_.rank ? wire(span) : received + place * count + byte);
    }
    sum(span, std::move(inputs), before);
  });
}

// Takes sums of other ranks.
void Scatter::take_message(const Message& message) {
  const char* received = static_cast<const char*>(message.received.const_data_ptr());
  for (int rank = 0; rank < plan_.size; ++rank) {
    visit_message(plan_.from[rank], message.at,
                  [&](const Span& span, int64_t byte, int64_t) { take(span, received + byte); });
    received += message.counts[rank];
  }
}

bool Scatter::is_done() {
  while (!there_.empty() && there_.front().work->is_done() && !there_.front().work->future()->hasError()) {
    sum_message(there_.front());
    there_.pop_front();
  }
  const auto has_arrived = [](const Message& message) { return message.work->is_done(); };
  return !returning_ && std::all_of(there_.begin(), there_.end(), has_arrived) &&
         std::all_of(back_.begin(), back_.end(), has_arrived);
}

// The process group ends its work within its timeout.
void Scatter::wait() {
  while (!wait_for(std::chrono::hours(1))) {
  }
}

bool Scatter::wait_for(std::chrono::milliseconds limit) {
  for (; !there_.empty(); there_.pop_front()) {
    if (!there_.front().work->wait_for(limit)) return false;
    sum_message(there_.front());
  }
  if (const std::shared_ptr<TorchComm> comm = std::move(returning_)) {
    for (int64_t at = 0; at < plan_.most_back; at += at_once_) {
      back_.push_back(start_message(*comm, plan_.onwards, plan_.from, at));
    }
  }
  for (; !back_.empty(); back_.pop_front()) {
    if (!back_.front().work->wait_for(limit)) return false;
    take_message(back_.front());
  }
  return true;
}

}  // namespace drivetrain::ddp
