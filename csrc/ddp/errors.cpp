// Implements the reducer's checks of parameters and gradients.
#include "ddp/errors.h"

#include <torch/csrc/autograd/variable.h>

#include "base/check.h"
#include "base/torch_text.h"

namespace drivetrain::ddp {
namespace {

constexpr size_t kNamesShown = 10;

}  // namespace

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) out += (i ? ", " : "") + names[i];
  if (names.size() > kNamesShown) out += text(", and ", names.size() - kNamesShown, " more");
  return out;
}

void LastError::keep() {
  try {
    throw;
  } catch (const c10::Error& error) {
    message_ = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message_ = error.what();
  } catch (...) {  // a Python exception without a text
  }
}

void check_hooked(const Parameter& param) {
  if (!param.accumulator) return;  // the hooks were removed on purpose
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param.tensor);
  if (accumulator.get() == param.accumulator.get()) return;
  throw EnvironmentError(
      text("parameter '", param.name,
           "' was changed after DistributedDataParallel wrapped it, by .half(), .double(), .to() or an assignment to "
           ".data of another type. Its gradient would no longer be reduced: convert the module before wrapping it."));
}

std::vector<std::string> take_unfrozen(NamedTensors& frozen) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : frozen) {
    if (tensor.requires_grad()) names.push_back(name);
  }
  if (!names.empty()) std::erase_if(frozen, [](const auto& named) { return named.second.requires_grad(); });
  return names;
}

void check_gradient(const Parameter& param, const at::Tensor& grad, at::ScalarType expected) {
  const at::Tensor& tensor = param.tensor;
  if (param.sparse != (grad.layout() == at::kSparse) || (grad.layout() != at::kStrided && !param.sparse)) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.layout(), ", expected ",
                          param.sparse ? "Sparse (its Embedding has sparse=True)" : "Strided",
                          ". Set sparse the same in every Embedding that shares the parameter, and to True only where "
                          "nothing else uses it."));
  }
  if (grad.scalar_type() != expected || grad.device() != tensor.device() || !grad.sizes().equals(tensor.sizes())) {
    throw_type_error(text("the gradient of parameter '", param.name, "' is ", grad.scalar_type(), " ", grad.sizes(),
                          " on ", grad.device().str(), ", expected ", expected, " ", tensor.sizes(), " on ",
                          tensor.device().str(),
                          ". Do not assign .grad or set grad_dtype to another type under DistributedDataParallel."));
  }
}

std::string consumed_message(const Parameter& param, const std::string& what) {
  return text(
      "parameter '", param.name, "' ", what,
      " during backward, before its gradient was reduced over ranks. A hook (register_post_accumulate_grad_hook, "
      "an optimizer fused into backward) used this rank's own gradient, and the replicas would diverge. Step "
      "after backward, use torch.distributed.optim._apply_optimizer_in_backward before wrapping, or register a "
      "communication hook.");
}

void fail_incomplete(const Parameters& params, const MissingGradients& missing) {
  std::string names, indices;
  for (size_t i : missing.indices) {
    names += (names.empty() ? "" : ", ") + params[i].name;
    indices += text(indices.empty() ? "" : " ", i);
  }
  std::string cause;
  if (missing.static_graph) {
    cause =
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
        "first iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
        "True.";
  } else {
    cause =
        "Some parameters got no gradient although backward was to be reduced over ranks. If a forward may leave "
        "parameters unused, say so by passing the keyword argument `find_unused_parameters=True` to "
        "DistributedDataParallel. Make sure that all `forward` function outputs participate in calculating loss. Call "
        "the wrapper, not its .module. An exception in the middle of that backward has the same effect, on every rank "
        "that it interrupts.";
    if (missing.finds_unused) {
      cause +=
          " Since `find_unused_parameters=True` is enabled, `forward` has probably not returned some output that "
          "reaches them. Outputs may hold tensors in lists, tuples, dicts and dataclasses.";
    }
  }
  throw EnvironmentError(
      text("Expected to have finished reduction in the prior iteration before starting a new one. ", cause,
           "\nParameter indices which did not receive grad for ", missing.rank, ": ", indices,
           "\nParameters which did not receive grad for ", missing.rank, ": ", names,
           "\n(For torch's own log of the step, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
           "DETAIL.)"));
}

void fail_changed_graph(const Parameter& param, int fired, int expected) {
  throw EnvironmentError(
      text("Your training graph has changed in this iteration, which static_graph=True does not allow: parameter '",
           param.name, "' got ", fired, fired == 1 ? " gradient" : " gradients", ", expected ", expected,
           " as in the first iteration. Leave static_graph out, or pass find_unused_parameters=True instead."));
}

void fail_second_gradient(const Parameter& param) {
  throw EnvironmentError(
      text("Expected to mark a variable ready only once, but parameter '", param.name,
           "' got a second gradient in the same synchronized backward. One cause is a use in several reentrant "
           "backward passes (torch.utils.checkpoint with use_reentrant=True): pass use_reentrant=False, or "
           "static_graph=True to DistributedDataParallel. Another is a use outside the wrapped module's forward: call "
           "the wrapper, not its .module. A third is a second backward after one forward."));
}

void fail_outside_window() {
  throw_value_error(
      "DistributedDataParallel with logical_ranks reduces gradients inside of drivetrain.accumulate() only: write "
      "window.backward(loss) in place of loss.backward().");
}

}  // namespace drivetrain::ddp
