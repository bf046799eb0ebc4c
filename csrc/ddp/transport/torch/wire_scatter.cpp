// Implements the reduce-scatter that rounds float32 values for the wire, with the bits of the all-reduce in wire.cpp.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "ddp/transport/torch/scatter.h"

namespace drivetrain::ddp {
namespace {

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

class WireScatter final : public Scatter {
 public:
  WireScatter(at::Tensor flat, WireFormat format, ScatterPlan plan, CarriedErrors* carried, TorchComm& group,
              std::shared_ptr<TorchComm> returning)
      : Scatter(std::move(plan), most_values(format), std::move(returning)), flat_(std::move(flat)), format_(format) {
    const ScatterPlan::Piece& last = plan_.pieces.back();
    rounded_ = at::empty({last.on_wire + bytes_of_values(last.end - last.begin)}, at::kByte);
    if (carried != nullptr) {
      int64_t own = 0;
      for (const Span& span : plan_.summed[plan_.rank]) own += span.end - span.begin;
      errors_ = carried->of(flat_.const_data_ptr<float>(), flat_.numel(), own);
      is_rounded_.resize(last.first_block + plan_.blocks_in({last.begin, last.end, plan_.pieces.size() - 1}));
    }
    start(group);
  }

 private:
  int64_t bytes_of_values(int64_t numel) const override { return wire_bytes(format_, numel); }

  char* value(const Span& span) const { return static_cast<char*>(flat_.data_ptr()) + span.begin * sizeof(float); }

  char* wire(const Span& span) const override {
    const ScatterPlan::Piece& piece = plan_.pieces[span.piece];
    return static_cast<char*>(rounded_.data_ptr()) + piece.on_wire + bytes_of_values(span.begin - piece.begin);
  }

  void encode_once(const Span& span) override {
    const auto encode = [this](const Span& part) {
      float* const rest = errors_ ? errors_->of_values.data() + part.begin : nullptr;
      ddp::encode(format_, value(part), rest, part.end - part.begin, wire(part));
    };
    if (is_rounded_.empty()) return encode(span);
    const ScatterPlan::Piece& piece = plan_.pieces[span.piece];
    const int64_t block = plan_.block, first = piece.first_block + (span.begin - piece.begin) / block;
    const int64_t count = plan_.blocks_in(span);
    for (int64_t from = 0, to = 0; from < count; from = to + 1) {
      for (to = from; to < count && !is_rounded_[first + to]; ++to) is_rounded_[first + to] = true;
      if (from < to) encode({span.begin + from * block, std::min(span.begin + to * block, span.end), span.piece});
    }
  }

  void sum(const Span& span, std::vector<char*> inputs, int64_t before) override {
    const int64_t numel = span.end - span.begin;
    ddp::sum(format_, inputs, 1, errors_ ? errors_->of_sums.data() + before : nullptr, numel);
    if (plan_.most_back > 0 && inputs[0] != wire(span)) std::memcpy(wire(span), inputs[0], bytes_of_values(numel));
    decode(format_, inputs[0], numel, value(span));
  }

  void take(const Span& span, const char* received) override {
    decode(format_, received, span.end - span.begin, value(span));
  }

  const at::Tensor flat_;
  const WireFormat format_;
  std::shared_ptr<TransferErrors> errors_;  // null: none are carried
  at::Tensor rounded_;                      // uint8, this rank's values and then its sums as they travel, by place
  // [blocks]; empty: none are carried. To round a block again would add its errors again.
  std::vector<bool> is_rounded_;
};

}  // namespace

std::unique_ptr<PendingReduce> start_wire_scatter(const at::Tensor& flat, WireFormat format, const RankRanges& ranges,
                                                  CarriedErrors* carried, TorchComm& group,
                                                  std::shared_ptr<TorchComm> returning) {
  ScatterPlan plan = {group.rank(), group.size(), block_values(format), pieces_of(flat.numel(), format, group.size())};
  plan.assign(ranges, sizeof(float));
  if (!plan.pays || (plan.most_back > 0 && !returning)) return nullptr;
  return std::make_unique<WireScatter>(flat, format, std::move(plan), carried, group, std::move(returning));
}

}  // namespace drivetrain::ddp
