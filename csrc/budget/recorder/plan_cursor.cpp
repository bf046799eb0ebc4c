// Matches the operations of a pass with its plan's; see plan_cursor.h.
#include "budget/recorder/plan_cursor.h"

#include <algorithm>

namespace drivetrain::budget {
namespace {

// The pass goes on at the nearest operation behind the expected one that ends a run of two equal operations. To go
// farther, or back as a loop does that repeats more often, takes a longer run, as short ones occur everywhere.
constexpr int32_t kNear = 64;  // operations
constexpr int32_t kShortRun = 2;
// Inserted operations may occur elsewhere in the plan, as layers resemble each other. Most insertions are shorter.
constexpr int32_t kPatience = 4;  // operations that match nothing before the pass goes on elsewhere

}  // namespace

int32_t PlanCursor::find(const std::string& name) const {
  if (plan_ == nullptr) return -1;
  if (static_cast<size_t>(next_) < plan_->ops.size() && plan_->ops[next_].name == name) return next_;
  if (num_unmatched_ < kPatience && static_cast<size_t>(next_) < plan_->ops.size()) return -1;
  const auto found = plan_->by_name.find(name);
  if (found == plan_->by_name.end()) return -1;
  const auto ahead = std::lower_bound(found->second.begin(), found->second.end(), next_);
  for (auto at = ahead; at != found->second.end(); ++at) {
    if (run_to(*at) >= (*at < next_ + kNear ? kShortRun : kLongestRun)) return *at;
  }
  for (auto at = ahead; at != found->second.begin();) {
    if (run_to(*--at) == kLongestRun) return *at;
  }
  return -1;
}

// Returns how many operations before the planned one, and this one, equal the last ones of the pass.
int32_t PlanCursor::run_to(int32_t planned) const {
  int32_t run = 1;
  for (const std::string* last : last_) {
    if (last == nullptr || run > planned || plan_->ops[planned - run].name != *last) break;
    ++run;
  }
  return run;
}

void PlanCursor::advance(int32_t planned, const std::string& name) {
  if (planned >= 0) next_ = planned + 1;
  num_unmatched_ = planned >= 0 ? 0 : num_unmatched_ + 1;
  std::copy_backward(last_.begin(), last_.end() - 1, last_.end());
  last_[0] = &name;
}

}  // namespace drivetrain::budget
