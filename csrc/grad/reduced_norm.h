// Remembers the sum of squares of gradients that a reduction over ranks has just written, so that clipping need not
// read them again.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace drivetrain::grad {

using Gradients = std::vector<c10::TensorImpl*>;

// The sum over all gradients of one reducer.
class ReducedNorm {
 public:
  // Registers the object, so that known_sum_of_squares() finds it as long as it exists.
  static std::shared_ptr<ReducedNorm> make();

  // Returns whether known_sum_of_squares() was called for these gradients, so that the reduction should sum squares.
  bool is_wanted() const;
  // Stores the reduction's result; none if it has not summed squares.
  void publish(Gradients gradients, std::optional<double> sum_of_squares);
  void forget();
  // Returns the sum if these are the gradients, no version has changed since, and a sample of each has the same bits.
  // From then on the sum is wanted.
  std::optional<double> ask(const Gradients& gradients);

 private:
  mutable std::mutex mutex_;
  bool is_wanted_ = false;
  Gradients gradients_;  // may be dangling; compared by address only
  std::vector<uint32_t> versions_;
  std::vector<uint64_t> samples_;  // one hash per gradient
  std::optional<double> sum_of_squares_;
};

// Returns the sum if a reduction has written exactly these gradients, in any order, and nothing has written them since.
// Writes through .data or a pointer are seen if they change a sampled element.
std::optional<double> known_sum_of_squares(const Gradients& gradients);

}  // namespace drivetrain::grad
