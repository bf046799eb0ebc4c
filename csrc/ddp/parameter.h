// Declares the trained parameter that all parts of the reducer refer to by its index.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

namespace drivetrain::ddp {

struct Parameter {
  at::Tensor tensor;
  std::string name;                                    // for messages
  bool sparse = false;                                 // its gradients are sparse
  at::ScalarType grad_dtype = at::kFloat;              // of `.grad`, unless mixed precision sets another
  std::shared_ptr<torch::autograd::Node> accumulator;  // null once the hooks are removed
};

using Parameters = std::vector<Parameter>;

}  // namespace drivetrain::ddp
