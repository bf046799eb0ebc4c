// Defers the multiplication of gradients until code reads them, so that a step can do it in its own pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "formats/factors.h"
#include "grad/norm.h"

namespace drivetrain::grad {

using formats::Factors;

class Deferral;

// The autograd metadata of a parameter whose gradient can wait for factors. Python's `.grad`, autograd and every other
// reader and writer reach a gradient through the two virtual functions below, on whatever thread, which multiply it
// first. A gradient waits only while this object has the sole reference to it, and it the sole reference to its memory.
class LazyGrad final : public torch::autograd::AutogradMeta {
 public:
  LazyGrad() = default;
  explicit LazyGrad(torch::autograd::AutogradMeta& former);  // takes the fields of a leaf's metadata
  LazyGrad(const LazyGrad&) = delete;
  LazyGrad& operator=(const LazyGrad&) = delete;
  ~LazyGrad() override;

  at::Tensor& mutable_grad() override;
  const at::Tensor& grad() const override;

  // Returns the gradient as it is in memory.
  at::Tensor& stored() { return grad_; }
  bool is_deferred() const { return is_deferred_.load(std::memory_order_acquire); }

 private:
  friend class Deferral;
  friend class FactorLock;
  void settle() const;

  mutable std::atomic<bool> is_deferred_{false};
  mutable std::shared_ptr<Deferral> deferral_;  // guarded by the lock in deferral.cpp
};

// Gradients that wait for the same factors.
class Deferral : public std::enable_shared_from_this<Deferral> {
 public:
  using Pointers = std::vector<std::shared_ptr<Deferral>>;

  // Makes the parameters' gradients wait, for no factor yet or for the inverse of a loss scale. With an inverse scale,
  // the caller will ask were_finite(), and float16 gradients, which torch refuses to unscale, cannot wait. Returns null
  // if one of them has another reference, belongs to no watched parameter, or is no plain gradient on the CPU. The GIL
  // must be held.
  static std::shared_ptr<Deferral> make(const std::vector<at::Tensor>& params, std::optional<double> inv_scale);

  // Returns the deferrals of the parameters that have gradients. Returns none if one of these does not wait, is there
  // twice, or waits together with others.
  static Pointers of(const std::vector<at::Tensor>& params);

  // Returns torch's 2-norm of the parameters' gradients times the factor that they wait for. `deferrals` are theirs.
  // Returns nothing if torch's bits cannot be had: dtypes or factors differ, or a factor is no power of two.
  static std::optional<at::Tensor> norm(const std::vector<at::Tensor>& params, const Pointers& deferrals);

  // Adds a clipping coefficient to all. Returns false, and does nothing, if one of them no longer waits or waits for
  // Factors::kMost.
  static bool multiply(const Pointers& deferrals, double factor);

  // Removes the parameters from their deferrals and returns whether no other of them has a gradient. Gradients become
  // undefined. With `zeroes` they become zeros if the result is true; else the caller must write them all. The GIL must
  // be held.
  static bool drop(const std::vector<at::Tensor>& params, bool zeroes);

  // Returns whether all elements were finite before the first factor.
  bool were_finite();
  void set_finite();

 private:
  friend class LazyGrad;
  friend class FactorLock;

  // These functions require the lock.
  void settle();
  bool measure();
  void take_out(LazyGrad& member);  // followed by forget_others()
  void forget_others();
  std::vector<Gradient> gradients() const;

  std::vector<LazyGrad*> members_;
  Factors factors_;
  bool measures_ = false;
  std::optional<bool> were_finite_;
};

// Returns the metadata if it is a LazyGrad, else null.
LazyGrad* lazy_grad_of(const c10::TensorImpl& param);

// Returns the gradient as it is in memory, and whether it waits for factors.
const at::Tensor& stored_grad(const c10::TensorImpl& param, bool& is_deferred);

// Lets the gradients of plain leaves on the CPU wait later. The GIL must be held, and no other thread may use the
// parameters: their metadata moves to another place.
void watch_gradients(const std::vector<at::Tensor>& params);

// Keeps factors as they are while a step reads gradients from memory. Without gradients that wait it locks nothing.
class FactorLock {
 public:
  // `params` have gradients. Multiplies these at once unless all of them wait for the same factors and `can_apply`.
  FactorLock(const std::vector<const c10::TensorImpl*>& params, bool can_apply);

  // Returns the factors that the step must apply.
  const Factors& factors() const { return factors_; }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  Factors factors_;
};

}  // namespace drivetrain::grad
