// Declares Inputs, which keeps the arguments of a checkpointed function until it is called again.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace drivetrain::recompute {

// Keeps tensors as autograd's saved variables, so that saved-tensor hooks in force, such as hooks of an outer
// checkpoint, apply to them. Finds tensors in nested tuples, lists and dicts, and copies lists and dicts, also of
// subclasses. The GIL must be held.
class Inputs {
 public:
  Inputs(pybind11::tuple args, pybind11::dict kwargs);

  // Returns the arguments, in new lists and dicts.
  std::pair<pybind11::tuple, pybind11::dict> get() const;

  // Names the first tensor that was written in place since construction: "argument 0", "argument 'mask'['left']";
  // empty: none. Skips tensors that an outer checkpoint holds, because it recomputes them.
  std::string first_written() const;

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    int64_t version;
  };

  pybind11::tuple args_;  // tensors are replaced by capsules with their index in inputs_
  pybind11::dict kwargs_;
  std::vector<Input> inputs_;
};

}  // namespace drivetrain::recompute
