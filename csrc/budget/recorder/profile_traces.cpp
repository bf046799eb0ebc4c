// Summarizes a profiled pass as the rows of a trace; see profile.h.
#include <algorithm>
#include <bit>
#include <functional>
#include <string_view>
#include <unordered_map>

#include "base/hash.h"
#include "budget/recorder/profile.h"

namespace drivetrain::budget {
namespace {

// Hashes an argument without tensors. Types other than numbers, strings and lists of them contribute only their kind.
uint64_t hash_of_setting(const c10::IValue& value) {
  const uint64_t hash = std::hash<std::string>()(value.tagKind());
  if (value.isInt()) return mix(hash, static_cast<uint64_t>(value.toInt()));
  if (value.isBool()) return mix(hash, static_cast<uint64_t>(value.toBool()));
  if (value.isDouble()) return mix(hash, std::bit_cast<uint64_t>(value.toDouble()));
  if (value.isString()) return mix(hash, std::hash<std::string_view>()(value.toStringView()));
  if (!value.isList()) return hash;
  uint64_t of_all = hash;
  for (const c10::IValue& element : value.toListRef()) of_all = mix(of_all, hash_of_setting(element));
  return of_all;
}

// Returns a number that is equal for operations that do the same work: same operator, settings, shapes and dtypes.
uint64_t kind_of(const RecordedOp& op) {
  uint64_t kind = mix(op.traits->identity, op.args.size());
  for (const c10::IValue& arg : op.args) kind = mix(kind, hash_of_setting(arg));
  for (const TensorRef& ref : op.refs) {
    kind = mix(mix(kind, static_cast<uint64_t>(ref.arg)), static_cast<uint64_t>(c10::typeMetaToScalarType(ref.dtype)));
    for (const c10::DimVector* dims : {&ref.sizes, &ref.strides}) {
      for (const int64_t dim : *dims) kind = mix(kind, static_cast<uint64_t>(dim));
    }
  }
  return kind;
}

}  // namespace

std::vector<ValueTrace> Profile::value_traces() const {
  std::vector<ValueTrace> traces;
  for (const Value& value : tape_.values) {
    // An overwritten value that cannot be recomputed is copied before the write, so it can be kept.
    traces.push_back({value.bytes, !value.is_overwritten || !value.can_recompute, value.can_recompute, value.replaces,
                      value.format_costs});
  }
  return traces;
}

// Gives each operation the median time of its kind. Differences within a kind are mostly noise, which must not
// influence the solver's choice.
std::vector<OpTrace> Profile::op_traces() const {
  std::vector<uint64_t> kinds;
  for (const RecordedOp& op : tape_.ops) kinds.push_back(kind_of(op));
  std::unordered_map<uint64_t, std::vector<double>> seconds_of;
  for (const auto& [op, timer] : timers_) seconds_of[kinds[op]].push_back(timer.seconds());
  for (auto& [_, seconds] : seconds_of) std::sort(seconds.begin(), seconds.end());
  std::vector<OpTrace> traces;
  for (size_t i = 0; i < tape_.ops.size(); ++i) {
    const RecordedOp& op = tape_.ops[i];
    std::vector<int32_t> writes;
    for (const OpResult& result : op.writes) writes.push_back(result.value);
    const auto found = seconds_of.find(kinds[i]);
    std::optional<double> seconds;
    if (found != seconds_of.end()) seconds = found->second[found->second.size() / 2];
    traces.push_back({op.traits->name, op.module, seconds, op.reads, writes, op.arguments});
  }
  return traces;
}

}  // namespace drivetrain::budget
