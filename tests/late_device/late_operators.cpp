// Runs torch's operators on the late device. Each runs the CPU's kernel when the current stream reaches it. The host
// finds the sizes of results at the call, by running the operator on zeros.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "late_device.h"

namespace late {
namespace {

bool is_late(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice.type(); }

// Returns a CPU tensor over the same memory.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()));
}

at::Tensor zeros_like_it(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type())).zero_();
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> memory_format) {
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Runs `body` without autograd and autocast, also if the thread that runs the stream has them on.
template <class Body>
void as_kernel(const Body& body) {
  const at::AutoDispatchBelowAutograd no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(at::autocast_dispatch_keyset);
  body();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  const bool* of_source = is_others(from.const_data_ptr());
  const bool* of_target = is_others(to.const_data_ptr());
  const bool is_pinned = !is_late(from) ? from.is_pinned() : is_late(to) || to.is_pinned();
  // A source that is not pinned is copied at once. The host waits for a target that is not pinned.
  const at::Tensor source = is_late(from) ? on_cpu(from) : is_pinned ? from : from.clone();
  const at::Tensor target = is_late(to) ? on_cpu(to) : to;
  const auto run = [source, target, of_source, of_target, from_late = is_late(from), to_late = is_late(to)] {
    if (from_late) count_late(of_source);
    if (to_late) count_late(of_target);
    as_kernel([&] { at::Tensor(target).copy_(source); });
  };
  const bool is_over_link = is_late(from) != is_late(to);
  enqueue(current_stream(), run, is_over_link ? model.seconds_per_byte * static_cast<double>(to.nbytes()) : 0);
  // A copy between two tensors of the device does not wait, as in CUDA.
  if ((is_late(from) && is_late(to)) || (non_blocking && is_pinned)) return to;
  wait_on_host(moment_of(current_stream()));
  return to;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  auto read = std::make_shared<at::Tensor>();
  const at::Tensor source = on_cpu(tensor);
  enqueue(current_stream(), [read, source] { *read = source.clone(); });
  wait_on_host(moment_of(current_stream()));
  return read->item();
}

// ---- Every other operator.

using Stack = torch::jit::Stack;

// Returns the argument with each tensor replaced by the result of `exchange`.
template <class Exchange>
c10::IValue with_tensors(const c10::IValue& value, const Exchange& exchange) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(exchange(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(exchange(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(exchange(*tensor)) : tensor);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

// Returns the index of the argument that a result aliases, if it is an in-place or out= result.
std::optional<size_t> argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  const c10::AliasInfo* alias = result.alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

at::Tensor on_device_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(kDevice));
}

// Returns the floating-point operations of a matrix product, 0 for others: 2 * m * n * k.
double flops_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  const bool adds = schema.name() == "aten::addmm";
  if (!adds && schema.name() != "aten::mm") return 0;
  const at::Tensor left = arguments[adds].toTensor(), right = arguments[adds + 1].toTensor();
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(1));
}

void enqueue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const Stack arguments = torch::jit::pop(*stack, num_arguments);
  std::vector<const bool*> touched;
  const auto aliased = [&](const at::Tensor& tensor) {
    if (!is_late(tensor)) return tensor.clone();
    touched.push_back(is_others(tensor.const_data_ptr()));
    return on_cpu(tensor);
  };
  Stack real, dummy;
  for (const c10::IValue& argument : arguments) real.push_back(with_tensors(argument, aliased));
  std::vector<at::Tensor> made;  // new results, which alias no argument
  bool makes = false;
  for (const c10::Argument& result : schema.returns()) makes |= !argument_of(schema, result);
  if (makes) {
    for (const c10::IValue& argument : arguments) dummy.push_back(with_tensors(argument, zeros_like_it));
    as_kernel([&] { op.callBoxed(&dummy); });
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const auto argument = argument_of(schema, schema.returns()[i])) {
      stack->push_back(arguments[*argument]);
      continue;
    }
    const auto make = [&](const at::Tensor& like) {
      if (!like.defined()) return made.emplace_back();
      return made.emplace_back(on_device_like(like));
    };
    if (!dummy[i].isTensor() && !dummy[i].isTensorList()) {
      throw std::runtime_error(schema.name() +
                               " returns a result that is not a tensor; the late device supports only tensors");
    }
    stack->push_back(with_tensors(dummy[i], make));
  }
  std::vector<at::Tensor> targets;
  for (const at::Tensor& tensor : made) targets.push_back(tensor.defined() ? on_cpu(tensor) : tensor);
  const double seconds = model.seconds_per_flop * flops_of(schema, arguments);
  const auto run = [op, real, targets, touched]() {
    for (const bool* of_tensor : touched) count_late(of_tensor);
    Stack on_stack = real;
    as_kernel([&] {
      op.callBoxed(&on_stack);
      size_t next = 0;
      const auto keep = [&](const at::Tensor& result) {
        at::Tensor target = targets[next++];
        return target.defined() ? target.copy_(result) : target;
      };
      for (size_t i = 0; i < op.schema().returns().size(); ++i) {
        if (!argument_of(op.schema(), op.schema().returns()[i])) with_tensors(on_stack[i], keep);
      }
    });
  };
  enqueue(current_stream(), run, seconds);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
        offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
  });
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue_operator>()); }

}  // namespace
}  // namespace late
