// Declares a check that a device makes and whose result the host learns in a later step, without waiting.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/transfer.h"

namespace drivetrain::ddp {

class LateCheck {
 public:
  // found: float64 [1] on a device, above 0 where something is wrong.
  void add(const at::Tensor& found) {
    found_ = found_.defined() ? found_.add(found) : found;
    is_sent_ = false;
    send();
  }

  // Returns true once if the host has learned of a failure.
  bool has_failed() {
    if (!heard_ || !heard_->has_come()) return false;
    const bool failed = heard_->value().data_ptr<double>()[0] > 0;
    heard_.reset();
    if (failed) found_ = at::Tensor();
    send();
    return failed;
  }

 private:
  // Sends one value at a time. Values found meanwhile go with the next one.
  void send() {
    if (is_sent_ || heard_ || !found_.defined()) return;
    heard_.emplace(found_);
    is_sent_ = true;
  }

  at::Tensor found_;  // the sum of all findings
  bool is_sent_ = false;
  std::optional<LateValue> heard_;
};

}  // namespace drivetrain::ddp
