// Forward leaves what is kept, backward takes and releases, and taking what is forgotten replays.
#include "budget/solver/simulator.h"

#include <algorithm>

#include "base/check.h"

namespace drivetrain::budget {

Simulator::Simulator(const TraceIndex& index)
    : index_(index),
      needs_(index.num_values()),
      needed_outputs_(index.num_ops()),
      is_replayed_(index.num_ops()),
      presence_(index.num_values()),
      was_needed_(index.num_values()) {
  for (const TraceValue& value : index.trace.values) bytes_.push_back(value.bytes);
}

// Readers come after what they read, so that one walk from the end finds everything.
void Simulator::find_needed(const std::vector<int32_t>& tickets) {
  needs_ = tickets;
  for (int32_t op = index_.num_ops() - 1; op >= 0; --op) {
    int32_t count = 0;
    for (int32_t value : index_.writes[op]) count += needs_[value] > 0 && (*keeping_)[value] == kForget;
    needed_outputs_[op] = count;
    if (count == 0) continue;
    for (int32_t value : index_.reads[op]) ++needs_[value];
  }
}

std::string Simulator::first_error(const Keeping& keeping) {
  if (keeping.size() != index_.trace.values.size()) {
    return text("keeping has ", keeping.size(), " entries: expected one for each of the ", index_.trace.values.size(),
                " values");
  }
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    const auto most = static_cast<int>(index_.trace.values[value].forms.size());
    if (keeping[value] >= kForget && keeping[value] <= most) continue;
    return text("keeping of value ", value, " is ", static_cast<int>(keeping[value]), ": expected -1 (forget) to ",
                most);
  }
  keeping_ = &keeping;
  find_needed(index_.num_tickets);
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (needs_[value] == 0 || index_.is_external(value) || keeping[value] == kForget) continue;
    if (index_.trace.values[value].can_keep) continue;
    return text("value ", value, " is kept and its memory is written over: expected it to be forgotten");
  }
  // What is only given back is never replayed.
  find_needed({index_.is_taken.begin(), index_.is_taken.end()});
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    if (needs_[value] == 0 || index_.is_external(value) || keeping[value] != kForget) continue;
    if (index_.trace.values[value].can_forget) continue;
    return text("value ", value, " is forgotten and cannot be replayed: expected it to be kept");
  }
  return "";
}

Outcome Simulator::run(const Keeping& keeping, Timeline* timeline) {
  keeping_ = &keeping;
  find_needed(index_.num_tickets);
  std::fill(is_replayed_.begin(), is_replayed_.end(), 0);
  seconds_ = 0;
  bytes_now_ = 0;
  for (int32_t value = 0; value < index_.num_values(); ++value) {
    was_needed_[value] = needs_[value] > 0;
    presence_[value] = Presence::kAbsent;
    if (index_.is_external(value)) {
      presence_[value] = Presence::kInFull;
    } else if (needs_[value] > 0 && keeping[value] != kForget) {
      presence_[value] = keeping[value] == 0 ? Presence::kInFull : Presence::kInForm;
      bytes_now_ += index_.kept_bytes(value, keeping[value]);
    }
  }
  Outcome outcome;
  outcome.forward_bytes = outcome.peak_bytes = bytes_now_;
  timeline_ = timeline;
  if (timeline != nullptr) {
    timeline->peak_bytes.assign(1, bytes_now_);
    timeline->replayed_at.assign(index_.num_ops(), -1);
    timeline->brought_back_at.assign(index_.num_values(), -1);
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

void Simulator::bring_back(int32_t value) {
  bytes_now_ += bytes_[value];
  note_peak(bytes_now_);
  const KeptForm& form = index_.trace.values[value].forms[(*keeping_)[value] - 1];
  bytes_now_ -= form.bytes;
  seconds_ += form.seconds;
  presence_[value] = Presence::kInFull;
  if (timeline_ != nullptr) timeline_->brought_back_at[value] = now_;
}

// Without recursion: what is missing may be a hundred thousand ops long.
void Simulator::make_present(int32_t value) {
  if (presence_[value] == Presence::kInFull) return;
  if (presence_[value] == Presence::kInForm) return bring_back(value);
  frames_.push_back({index_.writer[value], 0});
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
    const auto reads = index_.reads[frame.op];
    if (frame.next_read == static_cast<int32_t>(reads.size())) {
      replay(frame.op);
      frames_.pop_back();
      continue;
    }
    const int32_t read = reads[frame.next_read++];
    if (presence_[read] == Presence::kInForm) bring_back(read);
    if (presence_[read] == Presence::kAbsent) frames_.push_back({index_.writer[read], 0});
  }
}

void Simulator::replay(int32_t op) {
  seconds_ += index_.trace.ops[op].seconds;
  int64_t second_copies = 0;
  for (int32_t value : index_.writes[op]) {
    if (presence_[value] == Presence::kInFull) {
      second_copies += bytes_[value];
      continue;
    }
    const int32_t replaced = index_.trace.values[value].replaces;
    if (index_.takes_over[value] && needs_[replaced] == 1 && presence_[replaced] == Presence::kInFull) {
      presence_[replaced] = Presence::kAbsent;
      bytes_now_ -= bytes_[replaced];
    }
    bytes_now_ += bytes_[value];
  }
  note_peak(bytes_now_ + second_copies);
  for (int32_t value : index_.writes[op]) {
    if (presence_[value] == Presence::kInFull) continue;
    if (needs_[value] == 0) {
      bytes_now_ -= bytes_[value];
      continue;
    }
    if (presence_[value] == Presence::kInForm) bytes_now_ -= index_.kept_bytes(value, (*keeping_)[value]);
    presence_[value] = Presence::kInFull;
  }
  is_replayed_[op] = 1;
  if (timeline_ != nullptr) timeline_->replayed_at[op] = now_;
  no_longer_read_by(op);
}

void Simulator::no_longer_read_by(int32_t op) {
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
          presence_[value] == Presence::kInFull ? bytes_[value] : index_.kept_bytes(value, (*keeping_)[value]);
      presence_[value] = Presence::kAbsent;
    }
    const int32_t op = index_.writer[value];
    if ((*keeping_)[value] != kForget || is_replayed_[op] || --needed_outputs_[op] > 0) continue;
    for (int32_t read : index_.reads[op]) dropped_.push_back(read);
  }
}

namespace {

Outcome simulate(const Trace& trace, const Keeping& keeping, Timeline* timeline) {
  const TraceIndex index(trace);
  Simulator simulator(index);
  const std::string error = simulator.first_error(keeping);
  if (!error.empty()) throw UserError(error);
  return simulator.run(keeping, timeline);
}

}  // namespace

Outcome simulate(const Trace& trace, const Keeping& keeping) { return simulate(trace, keeping, nullptr); }

Timeline timeline_of(const Trace& trace, const Keeping& keeping) {
  Timeline timeline;
  simulate(trace, keeping, &timeline);
  return timeline;
}

}  // namespace drivetrain::budget
