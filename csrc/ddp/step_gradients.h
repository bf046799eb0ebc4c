// Declares the gradients of a step: which have come, how they enter the flat buffer and how their means leave it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/grad_buffer.h"
#include "ddp/parameter.h"

namespace drivetrain::ddp {

// Where a backward accumulates gradients: `.grad`. Distributed autograd over RPC has a context of its own instead.
class GradientStore {
 public:
  using Context = std::shared_ptr<torch::distributed::autograd::DistAutogradContext>;

  void use(Context context) { context_ = std::move(context); }  // null: `.grad`
  bool is_context() const { return context_ != nullptr; }

  // Lets `body` read and replace the parameter's gradient. The context's entry is written back.
  template <class Body>
  void with(const at::Tensor& param, Body&& body) const {
    if (!context_) {
      body(param.mutable_grad());
      return;
    }
    context_->runGradCallbackForVariable(param, [&](at::Tensor& grad) {
      body(grad);
      return true;
    });
  }

 private:
  Context context_;
};

// One parameter in the current step.
struct ParamStep {
  bool ready = false;         // its gradient has come, or is known to be none
  bool without_grad = false;  // this rank has none
  bool delegated = false;     // another wrapper around the same parameter reduces it in this backward
  int fired = 0;              // hooks so far
  uint32_t version = 0;       // of the tensor, when its gradient came
  bool is_changed = false;    // a hook has changed the tensor since
  at::Tensor untouched;       // copy of a kept `.grad` that this rank did not add to; put back if no rank used it
  // Stays `.grad` and gets the mean's values: the result of a backward with create_graph, or a tensor that the script
  // has assigned and refers to.
  at::Tensor own_grad;
  bool was_accumulated = false;  // autograd has added to a tensor that was `.grad` before
};

// Invariants: put_in() leaves this rank's part of the sum in the buffer, and a gradient exists twice only while it is
// copied. hand_back() is the only way by which a reduced value becomes `.grad`.
class StepGradients {
 public:
  // forget_step: abandons the step, before an error that leaves the reducer usable.
  StepGradients(const Parameters& params, GradBuffer& buffer, std::function<void()> forget_step)
      : params_(params), buffer_(buffer), forget_step_(std::move(forget_step)), steps_(params.size()) {}

  ParamStep& operator[](size_t param) { return steps_[param]; }
  const ParamStep& operator[](size_t param) const { return steps_[param]; }
  size_t size() const { return steps_.size(); }
  GradientStore& store() { return store_; }
  const GradientStore& store() const { return store_; }
  void reset();
  // Notes that the parameter's gradient comes.
  void note_arrival(size_t param) {
    steps_[param].version = params_[param].tensor._version();
    steps_[param].is_changed = false;
  }
  std::vector<size_t> missing() const;

  // Notes if autograd has added the gradient that came to what was `.grad` before. came: undefined if it is unknown.
  void note_accumulation(size_t param, const at::Tensor& came);
  // Moves the gradient to its region, scaled, and makes `.grad` the view of that region, unless the script keeps its
  // own.
  void take(size_t param, double scale);
  // Puts this rank's part of the sum where the transport takes it: the gradient, the kept gradient, or zeros.
  void put_in(size_t param, double scale);
  // Makes the reduced value `.grad`. used: a rank used the parameter; else `.grad` stays as it was, except under
  // gradient_as_bucket_view=True.
  void hand_back(size_t param, bool used);
  // Copies a communication hook's result to the gradients of full precision that the hook made (mixed precision).
  void copy_to_full_precision(const Bucket& bucket, const at::Tensor& result);

 private:
  void move_to_region(size_t param, at::Tensor& grad, double scale);

  const Parameters& params_;
  GradBuffer& buffer_;
  const std::function<void()> forget_step_;
  GradientStore store_;
  std::vector<ParamStep> steps_;  // by parameter
};

}  // namespace drivetrain::ddp
