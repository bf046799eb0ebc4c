// Gradients of 16-bit parameters accumulated in more bits than the parameters have: each micro-gradient is added by a
// hook before autograd would, and freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "grad/weight_grad.h"

namespace drivetrain::grad {

// A parameter's main gradient has a place for as long as this object lives, and is its .grad while that is defined: the
// first micro-gradient after zero_grad(set_to_none=True) overwrites it.
class MainGrads : public std::enable_shared_from_this<MainGrads> {
 public:
  // Whether the parameter of that index was told by another's hands that its gradient is in the main gradient already,
  // so that what autograd brings is to be dropped (and forgets it).
  using WasAdded = std::function<bool(size_t index)>;

  // main: per parameter float32, or bfloat16, which then has a residual of 8 bits beside it; of its shape and device,
  // walked alike.
  static std::shared_ptr<MainGrads> make(std::vector<at::Tensor> params, std::vector<at::Tensor> main,
                                         WasAdded was_added);
  ~MainGrads();
  MainGrads(const MainGrads&) = delete;
  MainGrads& operator=(const MainGrads&) = delete;

  // Another place for it, of the same kind; whoever says so has moved the .grad that was there.
  void move_to(size_t index, at::Tensor main);

  // int8, in the order of the gradient's memory: what .grad is short of; undefined where it has none, or somebody else
  // has written .grad since.
  at::Tensor residual(size_t index);

  // Whether a layer's weight gradient has been added; if not, autograd is to bring it.
  bool add(size_t index, const WeightGrad& weight_grad);

 private:
  struct Parameter {
    at::Tensor tensor;
    at::Tensor main;
    at::Tensor residual;                    // int8; undefined beside float32
    const c10::TensorImpl* seen = nullptr;  // the .grad that the residual belongs to
    uint32_t version = 0;                   // and its version
    std::shared_ptr<torch::autograd::Node> accumulator;
    torch::autograd::FunctionPreHook* hook = nullptr;  // the accumulator's
  };
  class Hook;

  MainGrads(std::vector<at::Tensor> params, std::vector<at::Tensor> main, WasAdded was_added);
  void add_hooks();
  at::Tensor take(size_t index, const at::Tensor& micro);
  template <class Add>
  static bool add_to(Parameter& param, bool was_added, const Add& add);
  static bool is_seen(const Parameter& param, const at::Tensor& grad);
  static void see(Parameter& param);

  std::mutex mutex_;
  std::vector<Parameter> params_;
  const WasAdded was_added_;
};

}  // namespace drivetrain::grad
