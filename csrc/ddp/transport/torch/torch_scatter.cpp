// Implements the reduce-scatter over a gloo process group.
#include "ddp/transport/torch/torch_scatter.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

// Limits the bytes that one rank sends to another at once, as gloo sends a large message first one way, then the other.
// A multiple of every element's size.
constexpr int64_t kExchangeBytes = 128 << 10;

// The largest segment of gloo's all-reduce, unless its caller asks for another, which torch does not.
constexpr int64_t kRingSegmentBytes = 1 << 20;

int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Returns the bytes of a chunk of gloo's ring all-reduce (gloo/allreduce.cc). Chunk c begins with the values of rank c
// - 1. The values of ranks c - 2, c - 3, ... (modulo the number of ranks) are added one by one, and rank c's last.
int64_t ring_chunk_bytes(int64_t bytes, int64_t element, int size) {
  const int64_t segments =
      rounded_up(std::max<int64_t>((bytes + kRingSegmentBytes - 1) / kRingSegmentBytes, 2 * size), size);
  return segments / size * rounded_up((bytes + segments - 1) / segments, element);
}

int64_t bytes_in(const std::vector<ByteSpan>& spans) {
  int64_t bytes = 0;
  for (const auto& [begin, end] : spans) bytes += end - begin;
  return bytes;
}

// Returns the bytes of a list that lie in a message which begins at `at`.
int64_t count_at(int64_t bytes, int64_t at) { return std::clamp<int64_t>(bytes - at, 0, kExchangeBytes); }

// Calls visit(offset in the tensor, offset in the message, bytes) for each part of a list that lies in that message.
template <class Visit>
void visit_message(const std::vector<ByteSpan>& spans, int64_t at, Visit&& visit) {
  int64_t behind = 0;  // of the span, in the list
  for (const auto& [begin, end] : spans) {
    const int64_t first = behind;
    behind += end - begin;
    if (first >= at + kExchangeBytes) return;
    const int64_t from = std::max(first, at), to = std::min(behind, at + kExchangeBytes);
    if (from < to) visit(begin + from - first, from - at, to - from);
  }
}

// Returns what lies between the ranges.
std::vector<ByteSpan> gaps_between(const RankRanges& ranges, int64_t bytes) {
  std::vector<ByteSpan> gaps;
  int64_t end = 0;
  for (const RankRange& range : ranges) {
    DT_INVARIANT(range.begin >= end && range.end >= range.begin && range.end <= bytes);
    if (range.begin > end) gaps.emplace_back(end, range.begin);
    end = range.end;
  }
  if (bytes > end) gaps.emplace_back(end, bytes);
  return gaps;
}

}  // namespace

bool TorchScatter::pays(const RankRanges& ranges, int64_t bytes, int size) {
  std::vector<int64_t> summed(size, bytes_in(gaps_between(ranges, bytes))), sent_on(size), taken(size);  // by rank
  for (const RankRange& range : ranges) {
    const int64_t length = range.end - range.begin;
    summed.at(range.rank) += length;
    sent_on.at(range.rank) += length * static_cast<int64_t>(range.also.size());
    for (const int other : range.also) taken.at(other) += length;
  }
  return TwoExchanges::pays(summed, sent_on, taken, bytes);
}

TorchScatter::TorchScatter(at::Tensor flat, ElementType type, const RankRanges& ranges, TorchComm& group,
                           std::shared_ptr<TorchComm> returning)
    : TwoExchanges(std::move(returning)),
      flat_(std::move(flat)),
      type_(type),
      rank_(group.rank()),
      size_(group.size()),
      onwards_(size_),
      from_(size_) {
  const Spans gaps = gaps_between(ranges, static_cast<int64_t>(flat_.nbytes()));
  std::vector<Spans> sent(size_);
  std::map<std::pair<int, int>, int64_t> between;  // bytes of the second exchange, by sender and receiver
  for (const RankRange& range : ranges) {
    const ByteSpan span(range.begin, range.end);
    sent.at(range.rank).push_back(span);
    for (const int other : range.also) {
      most_back_ = std::max(most_back_, between[{range.rank, other}] += range.end - range.begin);
      if (range.rank == rank_) onwards_.at(other).push_back(span);
      if (other == rank_) from_.at(range.rank).push_back(span);
    }
  }
  DT_INVARIANT(most_back_ == 0 || returning_);
  int64_t most = 0;
  for (Spans& of_rank : sent) {
    of_rank.insert(of_rank.end(), gaps.begin(), gaps.end());
    most = std::max(most, bytes_in(of_rank));
  }
  own_.swap(sent[rank_]);
  std::vector<Spans> received(size_, own_);
  received[rank_].clear();
  there_ = exchange(group, sent, received, most);
}

// Starts the messages of an exchange. sent: for each rank; received: from each rank. most: bytes, equal on all ranks.
std::deque<TorchScatter::Message> TorchScatter::exchange(TorchComm& comm, const std::vector<Spans>& sent,
                                                         const std::vector<Spans>& received, int64_t most) const {
  std::deque<Message> messages;
  for (int64_t at = 0; at < most; at += kExchangeBytes) {
    std::vector<int64_t> sent_counts, received_counts;
    for (int rank = 0; rank < size_; ++rank) {
      sent_counts.push_back(count_at(bytes_in(sent[rank]), at));
      received_counts.push_back(count_at(bytes_in(received[rank]), at));
    }
    const auto pack = [&](int rank, char* to) {
      visit_message(sent[rank], at, [&](int64_t offset, int64_t in_message, int64_t bytes) {
        std::memcpy(to + in_message, byte(offset), bytes);
      });
    };
    messages.push_back(start_message(comm, at, std::move(sent_counts), std::move(received_counts), pack));
  }
  return messages;
}

void TorchScatter::sum(const Message& message) {
  const int64_t chunk = ring_chunk_bytes(static_cast<int64_t>(flat_.nbytes()), bytes_of(type_), size_);
  const char* const received = static_cast<const char*>(message.received.const_data_ptr());
  visit_message(own_, message.at, [&](int64_t offset, int64_t in_message, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      const int64_t behind = std::min(bytes, ((offset + done) / chunk + 1) * chunk - offset);
      add_in_order(byte(offset + done), received + in_message + done, message, (offset + done) / chunk, behind - done);
      done = behind;
    }
  });
}

// Adds values that lie in one chunk of the ring. own: this rank's, which the sum replaces. received: where the first
// received ones would lie, as all ranks but this one sent equally many.
void TorchScatter::add_in_order(char* own, const char* received, const Message& message, int64_t chunk,
                                int64_t bytes) const {
  const int64_t count = message.counts[(rank_ + 1) % size_];
  std::vector<char*> inputs;
  for (int step = 1; step <= size_; ++step) {
    const int rank = static_cast<int>((chunk % size_ - step + 2 * size_) % size_);
    const int place = rank < rank_ ? rank : rank - 1;
    inputs.push_back(rank == rank_ ? own : const_cast<char*>(received) + place * count);
  }
  // gloo rounds each sum of 16-bit floats, so that these are added two by two.
  const int at_once = bytes_of(type_) == 2 ? 2 : size_;
  const int64_t numel = bytes / bytes_of(type_);
  for (int next = 1; next < size_; next += at_once - 1) {
    std::vector<const char*> addends = {inputs[0]};
    addends.insert(addends.end(), inputs.begin() + next, inputs.begin() + std::min(next + at_once - 1, size_));
    char* const output = next + at_once - 1 >= size_ ? own : inputs[0];
    sum_range({type_, type_, addends.data(), static_cast<int>(addends.size()), &output, 1, 0, numel, 1.0});
  }
}

// Takes sums of other ranks.
void TorchScatter::take(const Message& message) {
  const char* received = static_cast<const char*>(message.received.const_data_ptr());
  for (int rank = 0; rank < size_; ++rank) {
    visit_message(from_[rank], message.at, [&](int64_t offset, int64_t in_message, int64_t bytes) {
      std::memcpy(byte(offset), received + in_message, bytes);
    });
    received += message.counts[rank];
  }
}

std::deque<TorchScatter::Message> TorchScatter::start_back(TorchComm& comm) {
  return exchange(comm, onwards_, from_, most_back_);
}

}  // namespace drivetrain::ddp
