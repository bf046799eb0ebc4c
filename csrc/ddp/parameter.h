// Declares the trained parameter that all parts of the reducer refer to by its index, and which reducer reduces it.
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

// One reducer's claims on its parameters. Several wrappers may hold one parameter and take turns. In a backward that
// reaches both of them, the first to get the gradient reduces it for both.
//
// Invariant: at most one reducer of the process has a claim on a parameter. Claims end with release() or the object.
class ParameterClaims {
 public:
  explicit ParameterClaims(const Parameters& params);
  ~ParameterClaims();
  ParameterClaims(const ParameterClaims&) = delete;
  ParameterClaims& operator=(const ParameterClaims&) = delete;

  // Claims the parameter for the current backward. Returns false if another reducer reduces it in this backward.
  // Throws if another reducer has claimed it in a backward that has not ended.
  bool claim(const Parameter& param) const;
  void release();
  // Returns true if this process has more than one reducer.
  static bool has_several_reducers();

 private:
  const Parameters& params_;
};

}  // namespace drivetrain::ddp
