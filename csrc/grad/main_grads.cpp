// Installs the hooks that accumulate into main gradients; see main_grads.h.
#include "grad/main_grads.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/current_stream.h"
#include "base/grad_accumulator.h"
#include "formats/storage_torch.h"
#include "grad/add_micro_grad.h"
#include "grad/fuse_wgrad.h"

namespace drivetrain::grad {
namespace {

using torch::autograd::variable_list;

// Returns whether both tensors have the same layout and device.
bool is_walked_as(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.layout() == at::kStrided && tensor.device() == other.device() && tensor.sizes() == other.sizes() &&
         tensor.strides() == other.strides();
}

}  // namespace

class MainGrads::Hook : public torch::autograd::FunctionPreHook, public KeepsGradient {
 public:
  Hook(std::weak_ptr<MainGrads> owner, size_t index) : owner_(std::move(owner)), index_(index) {}

  variable_list operator()(const variable_list& grads) override {
    const auto owner = owner_.lock();
    if (!owner || !grads[0].defined()) return grads;
    return {owner->take(index_, grads[0])};
  }

  bool add(const WeightGrad& weight_grad) override {
    const auto owner = owner_.lock();
    return owner && owner->add(index_, weight_grad);
  }

 private:
  const std::weak_ptr<MainGrads> owner_;  // weak: a graph may outlive it
  const size_t index_;
};

std::shared_ptr<MainGrads> MainGrads::make(std::vector<at::Tensor> params, std::vector<at::Tensor> main,
                                           WasAdded was_added) {
  std::shared_ptr<MainGrads> made(new MainGrads(std::move(params), std::move(main), std::move(was_added)));
  made->add_hooks();
  return made;
}

MainGrads::MainGrads(std::vector<at::Tensor> params, std::vector<at::Tensor> main, WasAdded was_added)
    : was_added_(std::move(was_added)) {
  DT_INVARIANT(params.size() == main.size());
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter& param = params_.emplace_back();
    param.tensor = std::move(params[i]);
    param.main = std::move(main[i]);
    DT_INVARIANT(param.main.sizes() == param.tensor.sizes() && param.main.device() == param.tensor.device());
    if (param.main.scalar_type() == at::kBFloat16) {
      param.residual = at::zeros({param.main.numel()}, param.main.options().dtype(at::kChar));
    }
  }
}

void MainGrads::add_hooks() {
  for (size_t i = 0; i < params_.size(); ++i) {
    Parameter& param = params_[i];
    param.accumulator = grad_accumulator_of(param.tensor);
    // .grad may have another dtype than backward's result, which autograd would convert before the hook sees it.
    param.accumulator->mutable_input_metadata(0).set_grad_dtype(std::nullopt);
    auto hook = std::make_unique<Hook>(weak_from_this(), i);
    param.hook = hook.get();
    // Hooks of the node run after the users' hooks of the tensor.
    param.accumulator->add_pre_hook(std::move(hook));
  }
}

MainGrads::~MainGrads() {
  for (Parameter& param : params_) {
    if (!param.accumulator) continue;
    auto& hooks = param.accumulator->pre_hooks();
    hooks.erase(std::remove_if(hooks.begin(), hooks.end(), [&](const auto& hook) { return hook.get() == param.hook; }),
                hooks.end());
    param.accumulator->mutable_input_metadata(0).set_grad_dtype(param.main.scalar_type());
  }
}

void MainGrads::move_to(size_t index, at::Tensor main) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Parameter& param = params_.at(index);
  DT_INVARIANT(is_walked_as(main, param.main) && main.scalar_type() == param.main.scalar_type());
  // The residual moves along with the values.
  const bool moves = is_seen(param, param.main) && param.tensor.grad().is_same(main);
  param.main = std::move(main);
  if (moves) see(param);
}

at::Tensor MainGrads::residual(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Parameter& param = params_.at(index);
  return is_seen(param, param.tensor.grad()) ? param.residual : at::Tensor();
}

// Returns whether the residual belongs to this gradient and no other code (a reduction, a scaler, zero_grad) has
// written it since.
bool MainGrads::is_seen(const Parameter& param, const at::Tensor& grad) {
  return grad.defined() && grad.unsafeGetTensorImpl() == param.seen && grad._version() == param.version;
}

void MainGrads::see(Parameter& param) {
  param.seen = param.tensor.grad().unsafeGetTensorImpl();
  param.version = param.tensor.grad()._version();
}

// Returns the gradient for autograd to accumulate; undefined if it was added here.
at::Tensor MainGrads::take(size_t index, const at::Tensor& micro) {
  if (!params_[index].tensor.requires_grad()) return {};  // frozen since the forward pass; autograd drops it as well
  const bool was_added = was_added_(index);               // takes the GIL, so it must precede the mutex
  const std::lock_guard<std::mutex> lock(mutex_);
  Parameter& param = params_[index];
  // autograd accumulates sparse gradients.
  const bool fits =
      micro.layout() == at::kStrided && micro.sizes() == param.main.sizes() && micro.device() == param.main.device();
  const auto add_micro = [&](const at::Tensor& grad, bool starts) {
    if (was_added) return;
    const at::Tensor alike = is_walked_as(micro, grad) ? micro : at::empty_like(grad, micro.options()).copy_(micro);
    Addition addition{formats::array_of(grad), formats::array_of(alike), starts};
    if (param.residual.defined()) {
      addition.main.format = formats::Format::kBFloat16Remainder8;
      addition.main.extra = param.residual.data_ptr();
    }
    if (grad.is_cuda()) {
      const c10::DeviceGuard guard(grad.device());
      accumulate_cuda(addition, grad.numel(), current_stream(grad.device()));
    } else {
      accumulate(addition, grad.numel());
    }
  };
  return fits && add_to(param, was_added, add_micro) ? at::Tensor() : micro.to(param.main.scalar_type());
}

bool MainGrads::add(size_t index, const WeightGrad& weight_grad) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Parameter& param = params_.at(index);
  const bool has_residual = param.residual.defined();
  if (!param.main.is_contiguous() || !can_add(weight_grad, param.main.scalar_type(), has_residual)) return false;
  return add_to(param, /*was_added=*/false,
                [&](const at::Tensor& grad, bool starts) { grad::add(weight_grad, grad, param.residual, starts); });
}

// Calls `add` for .grad, or for the main gradient where .grad is undefined. Returns false where autograd must
// accumulate: for a differentiable gradient, or a .grad that other code has set.
template <class Add>
bool MainGrads::add_to(Parameter& param, bool was_added, const Add& add) {
  at::Tensor& grad = param.tensor.mutable_grad();
  const bool is_ours = !grad.defined() || (is_walked_as(grad, param.main) && !grad.requires_grad() &&
                                           grad.scalar_type() == param.main.scalar_type());
  if (at::GradMode::is_enabled() || !is_ours) return false;
  const at::NoGradGuard no_grad_tracking;
  const bool is_first = !grad.defined();
  if (!is_first && param.residual.defined() && !is_seen(param, grad)) param.residual.zero_();
  add(is_first ? param.main : grad, /*starts=*/is_first && !was_added);
  if (is_first) grad = param.main;
  grad.unsafeGetTensorImpl()->bump_version();
  see(param);
  return true;
}

}  // namespace drivetrain::grad
