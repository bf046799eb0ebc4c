// Simulates backward use by use, and replays operations where it takes values that were not saved.
#include "budget/solver/simulator.h"

#include <algorithm>

#include "base/check.h"

namespace drivetrain::budget {

Simulator::Simulator(const TraceIndex& index)
    : index_(index),
      needs_(index.num_values()),
      needed_outputs_(index.num_ops()),
      is_replayed_(index.num_ops()),
      presence_(index.num_values()) {
  for (const TraceValue& value : index.trace.values) bytes_.push_back(value.bytes);
}

// Operations come after those whose outputs they read, so one walk from the end finds everything.
void Simulator::find_needed(const std::vector<int32_t>& releases) {
  needs_ = releases;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    int32_t count = 0;
    for (int32_t value : index_.trace.ops[op].writes) count += needs_[value] > 0 && (*policy_)[value] == kRecompute;
    needed_outputs_[op] = count;
    if (count == 0) continue;
    for (int32_t value : index_.reads[op]) ++needs_[value];
  }
}

std::string Simulator::first_error(const Policy& policy) {
  if (policy.size() != index_.trace.values.size()) {
    return text("policy has ", policy.size(), " entries: expected one for each of the ", index_.trace.values.size(),
                " values");
  }
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    const auto most = static_cast<int>(index_.trace.values[value].formats.size());
    if (policy[value] >= kRecompute && policy[value] <= most) continue;
    return text("policy of value ", value, " is ", static_cast<int>(policy[value]), ": expected -1 (recompute) to ",
                most);
  }
  policy_ = &policy;
  find_needed(index_.num_releases);
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (needs_[value] == 0 || index_.is_external(value) || policy[value] == kRecompute) continue;
    if (index_.trace.values[value].can_save) continue;
    return text("policy saves value ", value, ", whose memory is overwritten: expected -1 (recompute)");
  }
  // A value that is released without having been taken is never recomputed.
  find_needed({index_.is_taken.begin(), index_.is_taken.end()});
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (needs_[value] == 0 || index_.is_external(value) || policy[value] != kRecompute) continue;
    if (index_.trace.values[value].can_recompute) continue;
    return text("policy recomputes value ", value, ", which cannot be recomputed: expected it to be saved");
  }
  return "";
}

Outcome Simulator::run(const Policy& policy, Timeline* timeline) {
  policy_ = &policy;
  find_needed(index_.num_releases);
  std::fill(is_replayed_.begin(), is_replayed_.end(), 0);
  seconds_ = 0;
  bytes_now_ = 0;
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    presence_[value] = Presence::kAbsent;
    if (index_.is_external(value)) {
      presence_[value] = Presence::kAsItIs;
    } else if (needs_[value] > 0 && policy[value] != kRecompute) {
      presence_[value] = policy[value] == kSave ? Presence::kAsItIs : Presence::kInStorageFormat;
      bytes_now_ += index_.saved_bytes(value, policy[value]);
    }
  }
  Outcome outcome;
  outcome.forward_bytes = outcome.peak_bytes = bytes_now_;
  timeline_ = timeline;
  if (timeline != nullptr) {
    timeline->peak_bytes.assign(1, bytes_now_);
    timeline->restored_at.assign(index_.num_values(), -1);
  }
  for (now_ = 0; now_ < index_.num_uses(); ++now_) {
    const TraceUse& use = index_.trace.uses[now_];
    peak_now_ = bytes_now_;
    if (use.is_release) {
      drop_one_need(use.value);
    } else {
      make_present(use.value);
    }
    outcome.peak_bytes = std::max(outcome.peak_bytes, peak_now_);
    if (timeline != nullptr) timeline->peak_bytes.push_back(peak_now_);
  }
  outcome.seconds = seconds_;
  return outcome;
}

void Simulator::restore(int32_t value) {
  bytes_now_ += bytes_[value];
  note_peak(bytes_now_);
  const FormatPrice& format = index_.trace.values[value].formats[(*policy_)[value] - 1];
  bytes_now_ -= format.bytes;
  seconds_ += format.seconds;
  presence_[value] = Presence::kAsItIs;
  if (timeline_ != nullptr) timeline_->restored_at[value] = now_;
}

// Avoids recursion, because a chain of missing values may have a hundred thousand operations.
void Simulator::make_present(int32_t value) {
  if (presence_[value] == Presence::kAsItIs) return;
  if (presence_[value] == Presence::kInStorageFormat) return restore(value);
  frames_.push_back({index_.writer[value], 0});
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
    const auto& reads = index_.reads[frame.op];
    if (frame.next_read == static_cast<int32_t>(reads.size())) {
      replay(frame.op);
      frames_.pop_back();
      continue;
    }
    const int32_t read = reads[frame.next_read++];
    if (presence_[read] == Presence::kInStorageFormat) restore(read);
    if (presence_[read] == Presence::kAbsent) frames_.push_back({index_.writer[read], 0});
  }
}

void Simulator::replay(int32_t op) {
  seconds_ += index_.trace.ops[op].seconds;
  int64_t second_copies = 0;
  for (int32_t value : index_.trace.ops[op].writes) {
    if (presence_[value] == Presence::kAsItIs) {
      second_copies += bytes_[value];
      continue;
    }
    const int32_t replaced = index_.trace.values[value].replaces;
    if (index_.takes_over[value] && needs_[replaced] == 1 && presence_[replaced] == Presence::kAsItIs) {
      presence_[replaced] = Presence::kAbsent;
      bytes_now_ -= bytes_[replaced];
    }
    bytes_now_ += bytes_[value];
  }
  note_peak(bytes_now_ + second_copies);
  for (int32_t value : index_.trace.ops[op].writes) {
    if (presence_[value] == Presence::kAsItIs) continue;
    if (needs_[value] == 0) {
      bytes_now_ -= bytes_[value];
      continue;
    }
    if (presence_[value] == Presence::kInStorageFormat) bytes_now_ -= index_.saved_bytes(value, (*policy_)[value]);
    presence_[value] = Presence::kAsItIs;
  }
  is_replayed_[op] = 1;
  for (int32_t value : index_.reads[op]) drop_one_need(value);
}

void Simulator::drop_one_need(int32_t first) {
  dropped_.push_back(first);
  while (!dropped_.empty()) {
    const int32_t value = dropped_.back();
    dropped_.pop_back();
    if (--needs_[value] > 0 || index_.is_external(value)) continue;
    if (presence_[value] != Presence::kAbsent) {
      bytes_now_ -=
          presence_[value] == Presence::kAsItIs ? bytes_[value] : index_.saved_bytes(value, (*policy_)[value]);
      presence_[value] = Presence::kAbsent;
    }
    const int32_t op = index_.writer[value];
    if ((*policy_)[value] != kRecompute || is_replayed_[op] || --needed_outputs_[op] > 0) continue;
    for (int32_t read : index_.reads[op]) dropped_.push_back(read);
  }
}

Outcome simulate(const Trace& trace, const Policy& policy, Timeline* timeline) {
  const TraceIndex index(trace);
  Simulator simulator(index);
  const std::string error = simulator.first_error(policy);
  if (!error.empty()) throw UserError(error);
  return simulator.run(policy, timeline);
}

}  // namespace drivetrain::budget
