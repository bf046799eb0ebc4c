// Declares the sums of a window's parts that one rank runs one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/parameter.h"

namespace drivetrain::ddp {

// The gradients and weights of finished parts, as nodes of a binary tree: (p0 + p1) + (p2 + p3). A rank of 2^n parts
// keeps n partial sums at most. Ranks add the roots of their trees in the same order (SumJob::in_tree), so that the
// result does not depend on which rank runs a part.
//
// Invariant: a parameter without a gradient counts as zeros, as it does in a sum over ranks.
class PartSums {
 public:
  explicit PartSums(const Parameters& params) : params_(params) {}

  void set_num_parts(int64_t num_parts) { num_parts_ = num_parts; }
  // Returns true while this rank has yet to run another part of the window after this one.
  bool is_before_last() const;
  // Takes the gradients of a part out of `.grad`. weight: the sum of the part's weights.
  void end_part(double weight);
  // Adds the finished parts to the last part's gradient of a parameter, and to its weight.
  void add_to(size_t param, const at::Tensor& grad) const;
  double add_to(double weight) const;
  void clear() { levels_.clear(); }

 private:
  // The sum of 2^n parts, for the n-th level.
  struct Level {
    double weight = 0;
    std::vector<at::Tensor> grads;  // by parameter; empty: there is none
    bool is_full() const { return !grads.empty(); }
  };

  const Parameters& params_;
  std::vector<Level> levels_;
  int64_t num_parts_ = 1;  // of this rank's windows
};

}  // namespace drivetrain::ddp
