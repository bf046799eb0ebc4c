// Tensors to be converted from one storage format to another, or filled: collected one by one, then written in one pass
// per device, for which the host does not wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "formats/convert.h"

namespace drivetrain::formats {

// A tensor of one format with what is beside it. Undefined where nothing is.
struct Stored {
  at::Tensor values;
  Format format;
  at::Tensor extra = {};
};

// Allocates what it is asked for, and fills it in run(). Results that run() has not reached hold no values.
class Conversions {
 public:
  // A state of `param`, of these sizes and every value `fill`: laid out in memory as the parameter where it has its
  // shape. dtype: none for the parameter's own. Returns the state, and its scales if it has 8 bits.
  std::tuple<at::Tensor, std::optional<at::Tensor>> new_state(const at::Tensor& param,
                                                              const std::vector<int64_t>& sizes,
                                                              std::optional<at::ScalarType> dtype, double fill);

  // `state` with its scales, if it has any, as a state of `param` of that dtype. Throws UserError for scales that do
  // not fit.
  std::tuple<at::Tensor, std::optional<at::Tensor>> converted_state(const at::Tensor& param, const at::Tensor& state,
                                                                    const std::optional<at::Tensor>& scales,
                                                                    at::ScalarType dtype);

  // What `param` keeps beside itself in this dtype; `before` is what it has had until now. May round the parameter
  // anew. Throws UserTypeError for a dtype that nothing beside such a parameter has.
  at::Tensor new_extra(const at::Tensor& param, const std::optional<at::Tensor>& before, at::ScalarType dtype);

  // A tensor with one zero, for a counter of steps.
  at::Tensor new_counter(at::Device device, at::ScalarType dtype);

  // Values written into a parameter; returns what its rounding left out, in that dtype.
  at::Tensor stored_param(const at::Tensor& param, const at::Tensor& values, at::ScalarType dtype);

  // Does all that has been collected. Needs no GIL.
  void run();

  // `from` undefined: every value is `fill`. Both must lie in memory in the same order, without gaps.
  void add(Stored from, Stored to, double fill = 0);

 private:
  struct Pair {
    Stored from, to;
    double fill;
  };
  // After the pass: `copy` goes to `original`, which lies otherwise in memory.
  struct WriteBack {
    at::Tensor original, copy;
  };

  void rewrite_param(const at::Tensor& param, Stored from, const at::Tensor& extra);
  static void run_on_cpu(const std::vector<Conversion>& jobs, int64_t num_chunks);
  static void run_on_cuda(const std::vector<Conversion>& jobs, int64_t num_chunks, c10::Device device);

  std::vector<Pair> pairs_;
  std::vector<WriteBack> write_backs_;
};

// Throws UserError unless they are those of this 8-bit state.
void check_scales(const at::Tensor& state, const std::optional<at::Tensor>& scales);

// A state's values as float32, in its own shape and strides; a parameter's, with what is beside it.
at::Tensor load_state(const at::Tensor& state, const std::optional<at::Tensor>& scales);
at::Tensor load_param(const at::Tensor& param, const std::optional<at::Tensor>& extra);

}  // namespace drivetrain::formats
