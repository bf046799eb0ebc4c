// Chooses the kernels of wire formats, and keeps rounding errors from one transfer to the next.
#include "ddp/transport/torch/wire_format.h"

#include <functional>
#include <iterator>

#include "base/cpu_isa.h"
#include "ddp/transport/rank_sum.h"
#include "ddp/transport/torch/float8_wire.h"

namespace drivetrain::ddp {
namespace {

static_assert(kWireBlock % kFloat8Block == 0);

// Limits the bytes that one rank sends to another at once. gloo sends a large message first one way, then the other,
// and one piece is summed while the next is on its way. Each message costs the wake-ups of several threads. With 128,
// 256 and 512 KiB, bfloat16 uses 95, 93 and 83 % of a wire of 100 Mbit/s. At 10 Gbit/s, 25 MiB of float32 values take
// 42, 25 and 30 ms so, and 31 ms in float32.
constexpr int64_t kMessageBytes = 256 << 10;

constexpr int64_t kHalfBytes = bytes_of(ElementType::kBFloat16);

// Converts values. `from` and `to` may be the same memory where SumJob allows it.
void convert(const char* from, ElementType from_type, char* to, ElementType to_type, int64_t begin, int64_t end) {
  sum_range({from_type, to_type, &from, 1, &to, 1, begin, end, 1});
}

Float8Wire float8() { return for_chosen_isa(DT_BY_ISA(ddp, float8_wire))(); }

uint8_t* bytes(char* memory) { return reinterpret_cast<uint8_t*>(memory); }

}  // namespace

int64_t wire_bytes(WireFormat format, int64_t numel) {
  if (format == WireFormat::kExact) return numel * bytes_of(ElementType::kFloat32);
  return format == WireFormat::kFloat8 ? float8_wire_bytes(numel) : numel * kHalfBytes;
}

int64_t most_values(WireFormat format) { return kMessageBytes / wire_bytes(format, kWireBlock) * kWireBlock; }

void encode(WireFormat format, const char* values, float* errors, int64_t numel, char* to) {
  if (format == WireFormat::kFloat8) {
    return float8().encode(reinterpret_cast<const float*>(values), errors, numel, bytes(to));
  }
  convert(values, ElementType::kFloat32, to, ElementType::kBFloat16, 0, numel);
}

void sum(WireFormat format, const std::vector<char*>& pieces, int num_outputs, float* errors, int64_t numel) {
  const int count = static_cast<int>(pieces.size());
  if (format == WireFormat::kFloat8) {
    std::vector<uint8_t*> blocks;
    for (char* piece : pieces) blocks.push_back(bytes(piece));
    return float8().sum(blocks.data(), count, num_outputs, errors, numel);
  }
  constexpr ElementType kType = ElementType::kBFloat16;
  sum_range({kType, kType, pieces.data(), count, pieces.data(), num_outputs, 0, numel, 1});
}

void decode(WireFormat format, const char* from, int64_t numel, char* to) {
  if (format == WireFormat::kFloat8) {
    return float8().decode(reinterpret_cast<const uint8_t*>(from), numel, reinterpret_cast<float*>(to));
  }
  // Goes from the end, and never writes over values that are still to be read.
  int64_t begin = 0;
  for (int64_t end = numel; end > 0; end = begin) {
    begin = end > 1 ? (end + 1) / 2 : 0;
    convert(from, ElementType::kBFloat16, to, ElementType::kFloat32, begin, end);
  }
}

CarriedErrors::CarriedErrors(const void* memory, int64_t bytes)
    : begin_(static_cast<const float*>(memory)), end_(begin_ + bytes / static_cast<int64_t>(sizeof(float))) {}

bool CarriedErrors::covers(const float* values, int64_t numel) const {
  return std::greater_equal<>()(values, begin_) && std::less_equal<>()(values + numel, end_);
}

std::shared_ptr<TransferErrors> CarriedErrors::of(const float* values, int64_t numel, int64_t numel_of_piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto end_of = [](const auto& entry) { return entry.first + entry.second->of_values.size(); };
  auto next = by_begin_.lower_bound(values);
  if (next != by_begin_.end() && next->first == values && end_of(*next) == values + numel &&
      static_cast<int64_t>(next->second->of_sums.size()) == numel_of_piece) {
    return next->second;
  }
  if (next != by_begin_.begin() && end_of(*std::prev(next)) > values) --next;
  while (next != by_begin_.end() && next->first < values + numel) next = by_begin_.erase(next);
  const auto errors = std::make_shared<TransferErrors>();
  errors->of_values.resize(numel);
  errors->of_sums.resize(numel_of_piece);
  by_begin_.emplace(values, errors);
  return errors;
}

}  // namespace drivetrain::ddp
