// The arguments of a checkpointed function, kept until it is called again.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace drivetrain::checkpoint {

// Tensors are kept as autograd keeps what it saves, so that whoever holds saved tensors now (an outer checkpoint, say)
// holds these, too. Those in tuples, lists and dicts are found, however deeply nested, and lists and dicts are kept as
// they are now. The GIL must be held.
class Inputs {
 public:
  Inputs(pybind11::tuple args, pybind11::dict kwargs);

  // The same again, in new lists and dicts.
  std::pair<pybind11::tuple, pybind11::dict> get() const;

  // Where the first tensor is that has been written since it was kept: "argument 0", "argument 'mask'['left']"; empty:
  // all are as they were. Those that an outer checkpoint holds are not looked at: it recomputes them.
  std::string first_written() const;

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    int64_t version;
  };

  pybind11::tuple args_;  // with the index into inputs_, in a capsule, where a tensor was
  pybind11::dict kwargs_;
  std::vector<Input> inputs_;
};

}  // namespace drivetrain::checkpoint
