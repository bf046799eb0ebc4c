// Implements the autograd function of linear layers with a fused weight gradient; see fuse_wgrad.h.
#include "grad/fuse_wgrad.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "base/grad_accumulator.h"
#include "base/stream_order.h"

namespace drivetrain::grad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

at::Tensor as_matrix(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes();
  return tensor.reshape({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
}

at::Tensor multiply(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, bool is_conv1d) {
  if (!is_conv1d) return at::linear(input, weight, bias.defined() ? std::optional(bias) : std::nullopt);
  at::DimVector sizes(input.sizes().slice(0, input.dim() - 1));
  sizes.push_back(weight.size(1));
  return at::addmm(bias, as_matrix(input), weight).view(sizes);
}

WeightGrad weight_grad_of(const at::Tensor& input, const at::Tensor& grad, bool is_conv1d) {
  const at::Tensor inputs = as_matrix(input).contiguous(), grads = as_matrix(grad).contiguous();
  return is_conv1d ? WeightGrad{inputs, grads} : WeightGrad{grads, inputs};
}

// Returns whether the running backward accumulates into the weight's .grad, and no hook sees the gradient before.
bool goes_unseen(const at::Tensor& weight, Node& accumulator) {
  if (!torch::autograd::impl::hooks(weight).empty()) return false;
  const auto is_ours = [](const auto& hook) { return dynamic_cast<KeepsGradient*>(hook.get()) != nullptr; };
  if (!std::all_of(accumulator.pre_hooks().begin(), accumulator.pre_hooks().end(), is_ours)) return false;
  if (torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr()) return false;
  // Excludes autograd.grad() and a backward with respect to other leaves.
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;
  const auto found = exec_info->find(&accumulator);
  return found != exec_info->end() && found->second.needed_ && !found->second.captures_;
}

// Returns the mutex that autograd's own accumulation holds while it reads and writes .grad: backward may run on several
// threads.
std::mutex& mutex_of(Node& accumulator) {
  struct Opened : Node {
    static std::mutex& mutex(Node& node) { return node.*(&Opened::mutex_); }
  };
  return Opened::mutex(accumulator);
}

at::Tensor gradient_view_of(Node& accumulator) {
  for (const auto& hook : accumulator.post_hooks()) {
    if (auto* owner = dynamic_cast<HasGradientView*>(hook.get())) return owner->gradient_view();
  }
  return {};
}

// Adds the gradient on the current stream. Returns whether it did.
bool add_in_order(const WeightGrad& weight_grad, const at::Tensor& weight, Node& accumulator) {
  const auto& keepers = accumulator.pre_hooks();
  if (!keepers.empty()) return dynamic_cast<KeepsGradient&>(*keepers.front()).add(weight_grad);
  const std::lock_guard<std::mutex> lock(mutex_of(accumulator));
  at::Tensor& grad = weight.mutable_grad();
  const at::Tensor to = grad.defined() ? grad : gradient_view_of(accumulator);
  if (!to.defined() || to.requires_grad() || to.layout() != at::kStrided || !to.is_contiguous() ||
      to.sizes() != weight.sizes() || to.device() != weight.device() || to.is_alias_of(weight_grad.left) ||
      to.is_alias_of(weight_grad.right) || !can_add(weight_grad, to.scalar_type(), /*has_residual=*/false)) {
    return false;
  }
  add(weight_grad, to, /*residual=*/{}, /*starts=*/!grad.defined());
  if (!grad.defined()) grad = to;
  return true;
}

// Adds the gradient and returns whether it did. Autograd orders the streams of two nodes by the gradient that one
// passes to the other. Here it passes none, although the accumulator's hooks read what this stream writes and vice
// versa.
bool add_to_grad(const WeightGrad& weight_grad, const at::Tensor& weight) {
  if (!weight.is_leaf() || !weight.requires_grad()) return false;  // computed, or frozen since the forward
  const auto accumulator = grad_accumulator_of(weight);
  if (!goes_unseen(weight, *accumulator)) return false;
  const std::optional<c10::Stream> here = stream_on(weight.device()), there = accumulator->stream();
  const bool differ = here && there && *here != *there;
  // The accumulator may have a stream from before the capture. Autograd takes it in only with a gradient.
  if (differ && is_capturing_on(weight.device())) return false;
  if (differ) run_after(*here, *there);
  const bool added = add_in_order(weight_grad, weight, *accumulator);
  if (differ && added) run_after(*there, *here);
  return added;
}

// Returns the product for autograd, in the dtype of .grad if the product can be summed in it.
at::Tensor product_of(const WeightGrad& weight_grad, const at::Tensor& weight) {
  const at::ScalarType dtype = weight.grad_dtype().value_or(weight.scalar_type());
  if (!can_add(weight_grad, dtype, /*has_residual=*/false)) return at::mm(weight_grad.left.t(), weight_grad.right);
  at::Tensor grad = at::empty(weight.sizes(), weight.options().dtype(dtype).requires_grad(false));
  add(weight_grad, grad, /*residual=*/{}, /*starts=*/true);
  return grad;
}

constexpr c10::DispatchKeySet kBatched({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});

struct FusedLinear : torch::autograd::Function<FusedLinear> {
  // The weight of the product, which autocast may have cast.
  struct Multiplied {
    at::Tensor weight;
  };

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const Multiplied& multiplied, bool is_conv1d) {
    ctx->set_materialize_grads(false);
    // As in torch's layer, a weight that the input's gradient does not need is not saved; a cast copy may change before
    // backward.
    ctx->save_for_backward({input, input.requires_grad() ? multiplied.weight : at::Tensor()});
    ctx->saved_data["weight"] = weight;
    ctx->saved_data["version"] = static_cast<int64_t>(weight._version());
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["is_conv1d"] = is_conv1d;
    return multiply(input, multiplied.weight, bias.value_or(at::Tensor()), is_conv1d);
  }

  // Casts the weight again as autocast did, so that the result is differentiable with respect to the weight.
  static at::Tensor cast_again(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& cast) {
    TORCH_CHECK(static_cast<int64_t>(weight._version()) == ctx->saved_data["version"].toInt(),
                "one of the variables needed for gradient computation has been modified by an inplace operation. It is "
                "the weight of a linear layer, of shape ",
                weight.sizes(), ", which backward with create_graph=True needs as it was in the forward.");
    return weight.to(cast.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(5);  // gradients of input, weight, bias and the two other arguments
    const at::Tensor& grad = grads[0];
    if (!grad.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], weight = ctx->saved_data["weight"].toTensor();
    const bool is_conv1d = ctx->saved_data["is_conv1d"].toBool();
    // create_graph=True, or vmap over gradients.
    const bool is_twice = at::GradMode::is_enabled(), is_batched = grad.key_set().has_any(kBatched);
    if (ctx->needs_input_grad(0)) {
      at::Tensor by = saved[1];
      if (is_twice && !by.requires_grad() && weight.requires_grad()) by = cast_again(ctx, weight, by);
      results[0] = at::matmul(grad, is_conv1d ? by.t() : by);
    }
    if (ctx->needs_input_grad(1)) {
      const WeightGrad weight_grad = weight_grad_of(input, grad, is_conv1d);
      if (is_twice || is_batched) {
        results[1] = at::mm(weight_grad.left.t(), weight_grad.right);
      } else if (!add_to_grad(weight_grad, weight)) {
        results[1] = product_of(weight_grad, weight);
      }
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) results[2] = as_matrix(grad).sum(0);
    return results;
  }
};

// Tensors that are nothing else, on devices that we know or that an extension of torch brings.
bool is_plain(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda() || tensor.is_privateuseone()) && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_complex() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace

at::Tensor fused_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& given_bias,
                        bool is_conv1d) {
  at::Tensor bias = given_bias.value_or(at::Tensor());
  // True inside a transform of torch.func.
  const bool is_transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  if (!at::GradMode::is_enabled() || !weight.requires_grad() || is_transformed || input.dim() == 0 ||
      weight.dim() != 2 || !is_plain(input) || !is_plain(weight)) {
    return multiply(input, weight, bias, is_conv1d);
  }
  const at::DeviceType device = weight.device().type();
  at::Tensor to_multiply = input, multiplied = weight;
  if (at::autocast::is_autocast_enabled(device)) {
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    to_multiply = at::autocast::cached_cast(dtype, input, device);
    multiplied = at::autocast::cached_cast(dtype, weight, device);
    if (bias.defined()) bias = at::autocast::cached_cast(dtype, bias, device);
    // The gradient of a cast copy would have the weight's size.
    if (!multiplied.is_same(weight)) multiplied = multiplied.detach();
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast_dispatch_keyset);
  return FusedLinear::apply(to_multiply, weight, bias.defined() ? std::optional(bias) : std::nullopt,
                            FusedLinear::Multiplied{multiplied}, is_conv1d);
}

}  // namespace drivetrain::grad
