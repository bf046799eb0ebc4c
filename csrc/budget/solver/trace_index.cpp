// Checks a trace and builds its index.
#include "budget/solver/trace_index.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace drivetrain::budget {
namespace {

// The parts of the message are joined only for an error.
template <class... Parts>
void require(bool holds, const Parts&... message) {
  if (!holds) throw UserError(text(message...));
}

bool is_time(double seconds) { return seconds >= 0 && std::isfinite(seconds); }
constexpr const char* kExpectedTime = " seconds: expected a finite number, 0 or more";
constexpr const char* kExpectedBytes = " bytes: expected 0 or more";

void check_value(const Trace& trace, int32_t index) {
  const TraceValue& value = trace.values[index];
  require(value.bytes >= 0, "value ", index, " has ", value.bytes, kExpectedBytes);
  for (size_t i = 0; i < value.formats.size(); ++i) {
    const auto& [bytes, seconds] = value.formats[i];
    require(bytes >= 0, "storage format ", i, " of value ", index, " has ", bytes, kExpectedBytes);
    require(is_time(seconds), "storage format ", i, " of value ", index, " takes ", seconds, kExpectedTime);
  }
  const auto count = static_cast<int64_t>(trace.values.size());
  require(value.replaces >= -1 && value.replaces < count && value.replaces != index, "value ", index,
          " replaces value ", value.replaces, ": expected another of the ", count, " values, or -1");
}

void check_index(const Trace& trace, int32_t value, const char* part, int32_t index, const char* verb) {
  const auto count = static_cast<int64_t>(trace.values.size());
  require(value >= 0 && value < count, part, index, verb, value, ": expected one of the ", count, " values");
}

}  // namespace

TraceIndex::TraceIndex(const Trace& checked) : trace(checked) {
  const int32_t count = num_values();
  for (int32_t value = 0; value < count; ++value) check_value(trace, value);
  writer.assign(count, -1);
  for (int32_t op = 0; op < num_ops(); ++op) {
    require(is_time(trace.ops[op].seconds), "op ", op, " takes ", trace.ops[op].seconds, kExpectedTime);
    for (int32_t value : trace.ops[op].writes) {
      check_index(trace, value, "op ", op, " writes value ");
      require(writer[value] < 0, "value ", value, " is written by op ", writer[value], " and by op ", op,
              ": expected one operation to write it");
      writer[value] = op;
    }
  }
  std::vector<int32_t> last_reader(count, -1);
  takes_over.assign(count, 0);
  can_recompute.assign(count, 0);
  reads.resize(num_ops());
  for (int32_t op = 0; op < num_ops(); ++op) {
    bool has_all_reads = true;
    for (int32_t value : trace.ops[op].reads) {
      check_index(trace, value, "op ", op, " reads value ");
      require(writer[value] < op, "op ", op, " reads value ", value, ", which op ", writer[value],
              " writes: expected an earlier operation to write it");
      if (is_external(value) || last_reader[value] == op) continue;
      last_reader[value] = op;
      reads[op].push_back(value);
      has_all_reads = has_all_reads && (trace.values[value].can_save || can_recompute[value]);
    }
    for (int32_t value : trace.ops[op].writes) {
      const int32_t replaced = trace.values[value].replaces;
      takes_over[value] = replaced >= 0 && last_reader[replaced] == op;
      can_recompute[value] = trace.values[value].can_recompute && has_all_reads;
    }
  }

  num_releases.assign(count, 0);
  is_taken.assign(count, 0);
  for (int32_t at = num_uses() - 1; at >= 0; --at) {
    const TraceUse& use = trace.uses[at];
    check_index(trace, use.value, "use ", at, " is of value ");
    if (use.is_release) {
      ++num_releases[use.value];
    } else {
      require(num_releases[use.value] > 0, "use ", at, " takes value ", use.value,
              ", which is not released after it: expected a release after each take");
      is_taken[use.value] = 1;
    }
  }

  may_be_needed = is_taken;
  may_be_replayed.assign(num_ops(), 0);
  for (int32_t op = num_ops() - 1; op >= 0; --op) {
    for (int32_t value : trace.ops[op].writes) {
      if (may_be_needed[value] && can_recompute[value]) may_be_replayed[op] = 1;
    }
    if (!may_be_replayed[op]) continue;
    for (int32_t value : reads[op]) may_be_needed[value] = 1;
  }
}

}  // namespace drivetrain::budget
