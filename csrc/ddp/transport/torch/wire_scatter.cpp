// Implements the reduce-scatter that rounds float32 values for the wire.
#include "ddp/transport/torch/wire_scatter.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

constexpr int64_t kValueBytes = sizeof(float);

using Spans = ScatterPlan::Spans;

int64_t values_in(const Spans& spans) {
  int64_t values = 0;
  for (const auto& span : spans) values += span.end - span.begin;
  return values;
}

// Returns the pieces of all transfers of an all-reduce, in their order.
std::vector<ScatterPlan::Piece> pieces_of(int64_t numel, WireFormat format, int size) {
  std::vector<ScatterPlan::Piece> pieces;
  const int64_t most = most_values(format) * size, block = block_values(format);
  int64_t on_wire = 0, first_block = 0;
  for (int64_t begin = 0; begin < numel; begin += most) {
    const int64_t part = std::min(most, numel - begin);
    for (int piece = 0; piece < size; ++piece) {
      const int64_t first = piece_begin(part, piece, size), last = piece_begin(part, piece + 1, size);
      pieces.push_back({begin + first, begin + last, on_wire, first_block});
      on_wire += wire_bytes(format, last - first);
      first_block += (last - first + block - 1) / block;
    }
  }
  return pieces;
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
  Blocks(const std::vector<ScatterPlan::Piece>& pieces, int64_t block) : pieces_(pieces), block_(block) {}

  template <class Visit>
  void visit(int64_t begin, int64_t end, Visit&& visit) {
    while (piece_ < pieces_.size() && pieces_[piece_].end <= begin) ++piece_;
    for (size_t piece = piece_; piece < pieces_.size() && pieces_[piece].begin < end; ++piece) {
      const auto& [first, last, on_wire, first_block] = pieces_[piece];
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

ScatterPlan plan_scatter(const RankRanges& ranges, int64_t numel, WireFormat format, int rank, int size) {
  ScatterPlan plan = {format, rank, size, pieces_of(numel, format, size), {}, {}, {}};
  plan.summed.resize(size);
  plan.onwards.resize(size);
  plan.from.resize(size);
  std::map<std::pair<int, int>, Spans> between;  // of the second exchange, by sender and receiver
  Blocks blocks(plan.pieces, block_values(format));
  int64_t done = 0;
  // Values of no range belong to all ranks.
  const auto add_gap = [&](int64_t end) {
    blocks.visit(done, end, [&](const ScatterPlan::Span& span) {
      for (Spans& spans : plan.summed) add_span(spans, span);
    });
  };
  for (const RankRange& range : ranges) {
    const int64_t begin = range.begin / kValueBytes, end = range.end / kValueBytes;
    DT_INVARIANT(begin >= done && end >= begin && end <= numel);
    add_gap(begin);
    blocks.visit(begin, end, [&](const ScatterPlan::Span& span) {
      add_span(plan.summed.at(range.rank), span);
      for (const int other : range.also) add_span(between[{range.rank, other}], span);
    });
    done = end;
  }
  add_gap(numel);

  const int64_t block = block_values(format);
  const auto blocks_of = [block](const Spans& spans) {
    int64_t count = 0;
    for (const auto& span : spans) count += (span.end - span.begin + block - 1) / block;
    return count;
  };
  std::vector<int64_t> values, sent_on(size), taken(size);  // by rank
  for (const Spans& spans : plan.summed) {
    values.push_back(values_in(spans));
    plan.most = std::max(plan.most, blocks_of(spans));
  }
  for (auto& [pair, spans] : between) {
    const auto [sender, receiver] = pair;
    sent_on.at(sender) += values_in(spans);
    taken.at(receiver) += values_in(spans);
    plan.most_back = std::max(plan.most_back, blocks_of(spans));
    if (sender == rank) plan.onwards[receiver] = spans;
    if (receiver == rank) plan.from[sender] = spans;
  }
  plan.pays = TwoExchanges::pays(values, sent_on, taken, numel);
  return plan;
}

WireScatter::WireScatter(at::Tensor flat, ScatterPlan plan, CarriedErrors* carried, TorchComm& group,
                         std::shared_ptr<TorchComm> returning)
    : TwoExchanges(plan.most_back > 0 ? std::move(returning) : nullptr),
      flat_(std::move(flat)),
      plan_(std::move(plan)) {
  DT_INVARIANT(plan_.most_back == 0 || returning_);
  const Spans& own = plan_.summed[plan_.rank];
  const ScatterPlan::Piece& last = plan_.pieces.back();
  rounded_ = at::empty({last.on_wire + wire_bytes(plan_.format, last.end - last.begin)}, at::kByte);
  if (carried != nullptr) errors_ = carried->of(flat_.const_data_ptr<float>(), flat_.numel(), values_in(own));
  if (errors_) {
    is_rounded_.resize(last.first_block + blocks_in({last.begin, last.end, plan_.pieces.size() - 1}));
  }
  std::vector<Spans> sent = plan_.summed;
  sent[plan_.rank].clear();
  const int64_t at_once = most_values(plan_.format) / block_values(plan_.format);
  for (int64_t at = 0; at < plan_.most; at += at_once) {
    // One message is rounded while those before it are on their way.
    for (const Spans& spans : plan_.summed) {
      visit_message(spans, at, [&](const Span& span, int64_t, int64_t) { encode_once(span); });
    }
    std::vector<int64_t> counts(plan_.size, bytes_in_message(own, at));
    counts[plan_.rank] = 0;
    there_.push_back(start(group, sent, std::move(counts), at));
  }
}

int64_t WireScatter::blocks_in(const Span& span) const {
  const int64_t block = block_values(plan_.format);
  return (span.end - span.begin + block - 1) / block;
}

int64_t WireScatter::first_block(const Span& span) const {
  const ScatterPlan::Piece& piece = plan_.pieces[span.piece];
  return piece.first_block + (span.begin - piece.begin) / block_values(plan_.format);
}

char* WireScatter::wire(const Span& span) const {
  const ScatterPlan::Piece& piece = plan_.pieces[span.piece];
  const int64_t byte = piece.on_wire + wire_bytes(plan_.format, span.begin - piece.begin);
  return static_cast<char*>(rounded_.data_ptr()) + byte;
}

// Calls visit(span, byte, value) for each part of a list that lies in the message which begins with block `at` of the
// list. `byte` is the part's first byte in the message, and `value` its first value in the list.
template <class Visit>
void WireScatter::visit_message(const Spans& spans, int64_t at, Visit&& visit) const {
  const int64_t block = block_values(plan_.format), behind = at + most_values(plan_.format) / block;
  int64_t blocks = 0, values = 0, bytes = 0;  // before the span, in the list and in the message
  for (const Span& span : spans) {
    const int64_t count = blocks_in(span);
    const int64_t from = std::max<int64_t>(at - blocks, 0), to = std::min(behind - blocks, count);
    if (from < to) {
      const Span part = {span.begin + from * block, std::min(span.begin + to * block, span.end), span.piece};
      visit(part, bytes, values + from * block);
      bytes += wire_bytes(plan_.format, part.end - part.begin);
    }
    blocks += count;
    values += span.end - span.begin;
    if (blocks >= behind) return;
  }
}

int64_t WireScatter::bytes_in_message(const Spans& spans, int64_t at) const {
  int64_t bytes = 0;
  visit_message(spans, at,
                [&](const Span& span, int64_t, int64_t) { bytes += wire_bytes(plan_.format, span.end - span.begin); });
  return bytes;
}

// Starts the message that begins with that block of each list. sent: for each rank.
WireScatter::Message WireScatter::start(TorchComm& comm, const std::vector<Spans>& sent,
                                        std::vector<int64_t> received_counts, int64_t at) const {
  std::vector<int64_t> sent_counts;
  for (const Spans& spans : sent) sent_counts.push_back(bytes_in_message(spans, at));
  const auto pack = [&](int rank, char* to) {
    visit_message(sent[rank], at, [&](const Span& span, int64_t byte, int64_t) {
      std::memcpy(to + byte, wire(span), wire_bytes(plan_.format, span.end - span.begin));
    });
  };
  return start_message(comm, at, std::move(sent_counts), std::move(received_counts), pack);
}

void WireScatter::encode_once(const Span& span) {
  const auto encode = [this](const Span& part) {
    float* const rest = errors_ ? errors_->of_values.data() + part.begin : nullptr;
    ddp::encode(plan_.format, value(part.begin), rest, part.end - part.begin, wire(part));
  };
  if (is_rounded_.empty()) return encode(span);
  const int64_t block = block_values(plan_.format), first = first_block(span), count = blocks_in(span);
  for (int64_t from = 0, to = 0; from < count; from = to + 1) {
    for (to = from; to < count && !is_rounded_[first + to]; ++to) is_rounded_[first + to] = true;
    if (from < to) encode({span.begin + from * block, std::min(span.begin + to * block, span.end), span.piece});
  }
}

void WireScatter::sum(const Message& message) {
  char* const received = static_cast<char*>(message.received.data_ptr());
  const int64_t count = message.counts[plan_.rank == 0 ? 1 : 0];  // equal for all other ranks
  visit_message(plan_.summed[plan_.rank], message.at, [&](const Span& span, int64_t byte, int64_t before) {
    std::vector<char*> inputs;
    for (int rank = 0; rank < plan_.size; ++rank) {
      const int place = rank < plan_.rank ? rank : rank - 1;
      inputs.push_back(rank == plan_.rank ? wire(span) : received + place * count + byte);
    }
    const int64_t numel = span.end - span.begin;
    ddp::sum(plan_.format, inputs, 1, errors_ ? errors_->of_sums.data() + before : nullptr, numel);
    if (returning_ && inputs[0] != wire(span)) {
      std::memcpy(wire(span), inputs[0], wire_bytes(plan_.format, numel));
    }
    decode(plan_.format, inputs[0], numel, value(span.begin));
  });
}

std::deque<WireScatter::Message> WireScatter::start_back(TorchComm& comm) {
  std::deque<Message> messages;
  const int64_t at_once = most_values(plan_.format) / block_values(plan_.format);
  for (int64_t at = 0; at < plan_.most_back; at += at_once) {
    std::vector<int64_t> counts;
    for (const Spans& spans : plan_.from) counts.push_back(bytes_in_message(spans, at));
    messages.push_back(start(comm, plan_.onwards, std::move(counts), at));
  }
  return messages;
}

// Takes sums of other ranks.
void WireScatter::take(const Message& message) {
  const char* received = static_cast<const char*>(message.received.const_data_ptr());
  for (int rank = 0; rank < plan_.size; ++rank) {
    visit_message(plan_.from[rank], message.at, [&](const Span& span, int64_t byte, int64_t) {
      decode(plan_.format, received + byte, span.end - span.begin, value(span.begin));
    });
    received += message.counts[rank];
  }
}

bool WireScatter::is_done() {
  while (!there_.empty() && there_.front().work->is_done() && !there_.front().work->future()->hasError()) {
    sum(there_.front());
    there_.pop_front();
  }
  return TwoExchanges::is_done();
}

}  // namespace drivetrain::ddp
