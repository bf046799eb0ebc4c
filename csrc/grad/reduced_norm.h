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

// A gradient as a reduction left it, or as somebody has it now: any write through autograd's eyes moves the version.
struct SeenGradient {
  const c10::TensorImpl* tensor;
  uint32_t version;

  explicit SeenGradient(c10::TensorImpl* impl)
      : tensor(impl), version(impl->is_inference() ? 0 : impl->version_counter().current_version()) {}
  bool operator==(const SeenGradient&) const = default;
};

// Of all gradients that one reducer reduces. The tensors must outlive what is published of them: forget() first.
class ReducedNorm {
 public:
  // Whoever asks known_sum_of_squares() finds it, as long as it exists.
  static std::shared_ptr<ReducedNorm> make();

  // Whether somebody has asked for just these gradients, so that sums are worth their trouble.
  bool is_wanted() const;
  // What the reduction has written; none: it has not added up squares.
  void publish(std::vector<SeenGradient> gradients, std::optional<double> sum_of_squares);
  void forget();
  // The sum, if these are the gradients; they are wanted from now on.
  std::optional<double> ask(const std::vector<SeenGradient>& gradients);

 private:
  mutable std::mutex mutex_;
  bool is_wanted_ = false;
  std::vector<SeenGradient> gradients_;
  std::optional<double> sum_of_squares_;
};

// If a reduction has left exactly these gradients, in any order, and nobody has written to them since. Writes through
// .data or a pointer are not seen.
std::optional<double> known_sum_of_squares(const std::vector<SeenGradient>& gradients);

}  // namespace drivetrain::grad
