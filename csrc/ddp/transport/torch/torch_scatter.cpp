// Implements the reduce-scatter over a gloo process group, with the bits of gloo's all-reduce or of a tree.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/torch/scatter.h"

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

class TorchScatter final : public Scatter {
 public:
  TorchScatter(at::Tensor flat, ElementType type, ScatterPlan plan, TorchComm& group,
               std::shared_ptr<TorchComm> returning, bool in_tree)
      : Scatter(std::move(plan), kExchangeBytes / bytes_of(type), std::move(returning)),
        flat_(std::move(flat)),
        type_(type),
        in_tree_(in_tree),
        chunk_(ring_chunk_bytes(static_cast<int64_t>(flat_.nbytes()), bytes_of(type), plan_.size) / bytes_of(type)) {
    start(group);
  }

 private:
  int64_t bytes_of_values(int64_t numel) const override { return numel * bytes_of(type_); }

  char* wire(const Span& span) const override {
    return static_cast<char*>(flat_.data_ptr()) + bytes_of_values(span.begin);
  }

  void sum(const Span& span, std::vector<char*> inputs, int64_t /*before*/) override {
    if (in_tree_) {
      sum_range({type_, type_, inputs.data(), plan_.size, &inputs[plan_.rank], 1, 0, span.end - span.begin, 1.0, true});
      return;
    }
    for (int64_t begin = span.begin, end = begin; begin < span.end; begin = end) {
      const int64_t chunk = begin / chunk_;
      end = std::min(span.end, (chunk + 1) * chunk_);
      add_in_order(inputs, chunk, end - begin);
      for (char*& input : inputs) input += bytes_of_values(end - begin);
    }
  }

  // Adds values that lie in one chunk of the ring.
  void add_in_order(const std::vector<char*>& by_rank, int64_t chunk, int64_t numel) const {
    const int size = plan_.size;
    std::vector<char*> inputs;
    for (int step = 1; step <= size; ++step) inputs.push_back(by_rank[(chunk % size - step + 2 * size) % size]);
    // gloo rounds each sum of 16-bit floats, so that these are added two by two.
    const int at_once = bytes_of(type_) == 2 ? 2 : size;
    for (int next = 1; next < size; next += at_once - 1) {
      const int behind = std::min(next + at_once - 1, size);
      std::vector<const char*> addends = {inputs[0]};
      addends.insert(addends.end(), inputs.begin() + next, inputs.begin() + behind);
      char* const output = behind == size ? by_rank[plan_.rank] : inputs[0];
      sum_range({type_, type_, addends.data(), static_cast<int>(addends.size()), &output, 1, 0, numel, 1.0});
    }
  }

  void take(const Span& span, const char* received) override {
    std::memcpy(wire(span), received, bytes_of_values(span.end - span.begin));
  }

  const at::Tensor flat_;
  const ElementType type_;
  const bool in_tree_;
  const int64_t chunk_;  // values
};

}  // namespace

std::unique_ptr<PendingReduce> start_torch_scatter(const at::Tensor& flat, ElementType type, const RankRanges& ranges,
                                                   TorchComm& group, std::shared_ptr<TorchComm> returning,
                                                   bool in_tree) {
  ScatterPlan plan = {group.rank(), group.size(), 1, {{0, flat.numel()}}};
  plan.assign(ranges, bytes_of(type));
  if (!plan.pays || (plan.most_back > 0 && !returning)) return nullptr;
  DT_INVARIANT(flat.is_contiguous());
  return std::make_unique<TorchScatter>(flat, type, std::move(plan), group, std::move(returning), in_tree);
}

}  // namespace drivetrain::ddp
