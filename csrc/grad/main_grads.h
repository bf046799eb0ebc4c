// Accumulates the gradients of 16-bit parameters in more bits: a hook adds each micro-batch's gradient before autograd
// would, and frees it.
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

// A parameter's main gradient keeps its memory for as long as this object lives, and is the parameter's .grad while
// that is defined. The first gradient after zero_grad(set_to_none=True) overwrites it.
class MainGrads : public std::enable_shared_from_this<MainGrads> {
 public:
  // Returns whether a layer has added the gradient of parameter `index` to the main gradient itself, so that autograd's
  // gradient must be dropped. Resets the flag.
  using WasAdded = std::function<bool(size_t index)>;

  // `main` has a tensor per parameter, of its shape, device and layout: float32, or bfloat16, which then gets a
  // residual of 8 bits.
  static std::shared_ptr<MainGrads> make(std::vector<at::Tensor> params, std::vector<at::Tensor> main,
                                         WasAdded was_added);
  ~MainGrads();
  MainGrads(const MainGrads&) = delete;
  MainGrads& operator=(const MainGrads&) = delete;

  // Moves the main gradient to another tensor of the same kind. The caller has moved .grad.
  void move_to(size_t index, at::Tensor main);

  // Returns the rounding error of .grad as int8, in the order of its memory. Undefined where there is none, or if other
  // code has written .grad since.
  at::Tensor residual(size_t index);

  // Adds a layer's weight gradient. Returns false if autograd must add it.
  bool add(size_t index, const WeightGrad& weight_grad);

 private:
  struct Parameter {
    at::Tensor tensor;
    at::Tensor main;
    at::Tensor residual;                    // int8; undefined for float32
    const c10::TensorImpl* seen = nullptr;  // the .grad that the residual belongs to
    uint32_t version = 0;                   // the version of that .grad
    std::shared_ptr<torch::autograd::Node> accumulator;
    torch::autograd::FunctionPreHook* hook = nullptr;  // owned by the accumulator
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
