// Starts and ends the recording of passes, and keeps track of those that wait for their backward; see recorder.h.
#include "budget/recorder/recorder.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "base/check.h"
#include "budget/recorder/dispatch.h"

namespace drivetrain::budget {
namespace {

// Only the first passes under a plan and some later ones compare checksums, because that reads every byte once more.
// Code that writes unseen mostly does so in every step. The interval is odd, so that each micro-batch has its turn.
constexpr int64_t kFirstChecked = 8;
constexpr int64_t kCheckedEvery = 31;

}  // namespace

Recorder::~Recorder() { stop(); }

void Recorder::set_plans(std::vector<std::shared_ptr<TapePlan>> plans) {
  plans_ = std::move(plans);
  num_passes_ = 0;
}

std::vector<std::vector<double>> Recorder::seconds_by_op() const {
  std::vector<std::vector<double>> seconds;
  for (const auto& plan : plans_) {
    seconds.push_back(plan->seconds);
    for (double& one : seconds.back()) one /= static_cast<double>(std::max<int64_t>(1, plan->num_passes));
  }
  return seconds;
}

void Recorder::reset() {
  shared_->tracker.reset();
  for (const auto& plan : plans_) {
    plan->seconds.assign(plan->ops.size(), 0);
    plan->num_passes = 0;
  }
}

bool Recorder::is_on_this_thread() const { return pass_ && recorded_pass() == pass_.get(); }

std::shared_ptr<RecordedPass> Recorder::enter(bool must_record) {
  if (is_on_this_thread()) return nullptr;
  if (pass_ && !pass_->is_closed()) {
    if (!must_record) return nullptr;
    throw std::runtime_error("another thread is in a forward pass of this plan: run one forward pass at a time");
  }
  if (recorded_pass() != nullptr) {
    if (!recorded_pass()->is_closed()) return nullptr;
    end_recording();
  }
  warn_if_exceeded();
  for (std::vector<std::weak_ptr<RecordedPass>>* passes : {&waiting_, &failed_}) {
    std::erase_if(*passes, [](const std::weak_ptr<RecordedPass>& pass) {
      const auto alive = pass.lock();
      return !alive || !alive->is_in_use();
    });
  }
  if (waiting_.empty()) shared_->tracker.begin_step();
  std::shared_ptr<TapePlan> plan;
  if (!plans_.empty()) plan = plans_[std::min(waiting_.size(), plans_.size() - 1)];
  const bool compares_checksums =
      !shared_->is_profile && (num_passes_ < kFirstChecked || num_passes_ % kCheckedEvery == 0);
  ++num_passes_;
  const auto pass = std::make_shared<RecordedPass>(shared_, plan, compares_checksums);
  begin_recording(pass);
  shared_->tracker.open(pass);
  pass_ = pass;
  if (plan) ++plan->num_passes;
  return pass;
}

void Recorder::leave(const std::shared_ptr<RecordedPass>& pass, bool is_complete) {
  if (!pass || recorded_pass() != pass.get()) return;  // stop() may have ended it
  end_recording();
  end(pass, is_complete);
  if (is_complete) warn_if_exceeded();
}

void Recorder::warn_if_exceeded() {
  const int64_t kept = shared_->tracker.counts().exceeding_bytes;
  if (kept == 0 || has_warned_) return;
  has_warned_ = true;
  const auto megabytes = [](int64_t bytes) { return text(static_cast<double>(bytes / 10'000) / 100, " MB"); };
  const std::string why =
      divergence_.empty()
          ? "its operations are the planned ones, on larger tensors, or more of its passes wait for one "
            "backward. Plan on such a step."
          : text("it took another path than the planned step: ", divergence_,
                 ". Plan on a batch that takes this path, or with a smaller budget.");
  const std::string warning = text("activation_budget: a step keeps ", megabytes(kept),
                                   " for backward, above the budget of ", megabytes(shared_->budget_bytes), ": ", why);
  if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) throw pybind11::error_already_set();
}

void Recorder::end(const std::shared_ptr<RecordedPass>& pass, bool is_complete) {
  if (pass_ == pass) pass_.reset();
  if (!is_complete) {
    failed_.push_back(pass);
    try {
      pass->end();
    } catch (...) {  // the exception that ended the pass is the one to report
      pass->abandon();
    }
    return;
  }
  pass->end();
  divergence_ = pass->recording().divergence();
  waiting_.push_back(pass);
  if (pass->profile() != nullptr) profiled_.push_back(pass);
}

void Recorder::stop() {
  if (!pass_) return;
  if (is_on_this_thread()) {
    end_recording();
    end(std::exchange(pass_, nullptr), /*is_complete=*/false);
  } else {
    pass_->close();
    pass_.reset();
  }
}

void Recorder::abandon() {
  profiled_.clear();
  for (const std::vector<std::weak_ptr<RecordedPass>>* passes : {&waiting_, &failed_}) {
    for (const std::weak_ptr<RecordedPass>& waiting : *passes) {
      if (const auto pass = waiting.lock()) pass->abandon();
    }
  }
}

int32_t Recorder::module() const { return is_on_this_thread() ? pass_->recording().module() : -1; }

void Recorder::set_module(int32_t module) {
  if (is_on_this_thread()) pass_->recording().set_module(module);
}

std::vector<std::shared_ptr<RecordedPass>> Recorder::take_profiled() { return std::exchange(profiled_, {}); }

}  // namespace drivetrain::budget
