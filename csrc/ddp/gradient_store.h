// Declares where a backward accumulates gradients: `.grad`, or a context of distributed autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <memory>
#include <utility>

namespace drivetrain::ddp {

// Distributed autograd over RPC keeps gradients in a context of its own instead of in `.grad`.
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

}  // namespace drivetrain::ddp
