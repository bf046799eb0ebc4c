// Writes the error messages for regions whose recomputation differs from their forward; see region.h.
#include <c10/util/Type.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "base/torch_text.h"
#include "recompute/region.h"

namespace py = pybind11;

namespace drivetrain::recompute {
namespace {

constexpr const char* kOtherPath =
    "Usually the function took another path, because state that it depends on changed between forward and backward. "
    "Such state is a counter, a global, a cache that its first call filled, or random numbers that are not torch's. "
    "Calls of train() or eval() in between have the same effect.";

py::object location_py(const char* function) {
  return py::module_::import("drivetrain.recompute.location").attr(function);
}

// Returns a text such as "float32 [4, 8] on cpu, output of AddmmBackward0".
std::string description(const SavedMetadata& saved) {
  std::string described = text(py::str(py::cast(saved.dtype)).cast<std::string>(), " ",
                               c10::SymIntArrayRef(saved.sizes), " on ", saved.device.str());
  if (saved.grad_fn == nullptr) return described;
  const std::string node = c10::demangle(saved.grad_fn->name());
  return described + ", output of " + node.substr(node.rfind(':') + 1);
}

}  // namespace

std::string current_location() { return location_py("here")().cast<std::string>(); }

std::string owner_in(const c10::SafePyObject& module, const at::Tensor& tensor) {
  const py::object alive = py::handle(module.ptr(getPyInterpreter()))();
  return alive.is_none() ? "" : location_py("owner_in")(alive, tensor).cast<std::string>();
}

bool is_running_statistic(const at::Tensor& tensor) { return location_py("is_running_statistic")(tensor).cast<bool>(); }

void throw_checkpoint_error(const std::string& message) {
  const py::object type = py::module_::import("torch.utils.checkpoint").attr("CheckpointError");
  PyErr_SetString(type.ptr(), text("drivetrain.checkpoint: ", message).c_str());
  throw py::error_already_set();
}

std::string CheckpointRegion::name() const { return location_py("name_of")(function_).cast<std::string>(); }

std::string CheckpointRegion::input_written(const std::string& input) const {
  const std::string which = text(input, " of ", name());
  if (!has_ended_) {
    return text(which,
                " was modified in place by the function itself, but backward calls the function again with the same "
                "arguments. Clone that tensor first, or use an operation that is not in place.");
  }
  return text(which,
              " was modified in place after the forward. Backward calls the function again with it, and gradients "
              "would belong to other values. Usually an operation in place (add_, masked_fill_, copy_) came in "
              "between: clone the tensor, or use one that is not in place.");
}

std::string CheckpointRegion::device_initialized() const {
  return text(name(),
              " was the first to use the accelerator, so the state of its random numbers before the call is unknown. "
              "Initialize it before (torch.cuda.init()), or pass preserve_rng_state=False if the function uses no "
              "random numbers.");
}

std::string CheckpointRegion::outliving_written(size_t index, const at::Tensor& recomputed) const {
  const std::string owner = location_py("owner_of")(recomputed).cast<std::string>();
  return text(
      owner.empty() ? text("tensor ", index + 1, " of ", saved_.size()) : owner, " (", description(saved_[index]),
      "), which ", name(), " saved for backward, has been modified in place since, ", current_location(),
      ": gradients would belong to other values. Usually an optimizer stepped between forward and backward, or "
      "the function updates a buffer in place and then computes with it. If the write does not change any value, "
      "pass determinism_check=\"none\".");
}

std::string CheckpointRegion::changed(size_t index, const at::Tensor& recomputed) const {
  const SavedMetadata& before = saved_[index];
  const SavedMetadata now(recomputed);
  const bool same_metadata = now.sizes == before.sizes && now.dtype == before.dtype && now.device == before.device;
  std::string why = kOtherPath;
  if (same_metadata) {
    why = text(
        options_.preserve_rng_state ? "Usually random numbers of another generator than torch's default ones"
                                    : "Usually dropout or other random numbers, as preserve_rng_state is False",
        ". It may also be a buffer that forward updates (running statistics) and then computes with, or a global "
        "that was changed. Or a parameter or buffer was written through .data in between. Otherwise an operation is "
        "not deterministic; torch.use_deterministic_algorithms(True) finds such operations.");
  }
  return text("tensor ", index + 1, " of ", saved_.size(), " that ", name(), " saved for backward has other ",
              same_metadata ? "values" : "metadata", " when it is recomputed.\n  forward: ", description(before),
              before.location.empty() ? "" : ", ", before.location, "\n  recomputed: ", description(now), ", ",
              current_location(), "\n", why);
}

std::string CheckpointRegion::other_number(size_t num_recomputed) const {
  const bool is_fewer = num_recomputed < saved_.size();
  return text(name(), " saved ", saved_.size(), " tensors for backward and ", is_fewer ? "only " : "at least ",
              num_recomputed, " when it was called again.\n  ",
              is_fewer ? text("The first missing one: ", description(saved_[num_recomputed]),
                              saved_[num_recomputed].location.empty() ? "" : ", ", saved_[num_recomputed].location)
                       : text("The first additional one is saved ", current_location()),
              "\n", kOtherPath);
}

std::string CheckpointRegion::value_written(size_t index) const {
  return text("tensor ", index + 1, " of ", saved_.size(), " that ", name(), " saved for backward (",
              description(saved_[index]), saved_[index].location.empty() ? "" : ", ", saved_[index].location,
              ") was modified in place afterwards, inside the function, but backward needs the saved values. Use an "
              "operation that is not in place, as without checkpointing.");
}

}  // namespace drivetrain::recompute
