// The sum of squares of gradients that a reduction over ranks has just written: whoever clips them then need not read
// them again.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace drivetrain::grad {

using Gradients = std::vector<c10::TensorImpl*>;

// Of all gradients that one reducer reduces.
class ReducedNorm {
 public:
  // Whoever asks known_sum_of_squares() finds it, as long as it exists.
  static std::shared_ptr<ReducedNorm> make();

  // Whether somebody has asked for just these gradients, so that sums are worth their trouble.
  bool is_wanted() const;
  // What the reduction has written; none: it has not added up squares.
  void publish(Gradients gradients, std::optional<double> sum_of_squares);
  void forget();
  // The sum, if these are the gradients, no version has moved since, and a sample of each holds the same bits; they are
  // wanted from now on.
  std::optional<double> ask(const Gradients& gradients);

 private:
  mutable std::mutex mutex_;
  bool is_wanted_ = false;
  Gradients gradients_;  // may be gone, unless somebody asks for the very same
  std::vector<uint32_t> versions_;
  std::vector<uint64_t> samples_;  // a hash each
  std::optional<double> sum_of_squares_;
};

// If a reduction has left exactly these gradients, in any order, and nothing has been written to them since. Of writes
// through .data or a pointer those are seen that change an element of a sample.
std::optional<double> known_sum_of_squares(const Gradients& gradients);

}  // namespace drivetrain::grad
