// Collects tensors to convert between storage formats or to fill, and writes them in one pass per device without
// waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "formats/convert.h"

namespace drivetrain::formats {

// A tensor with its companion `extra`; a member is undefined where there is none.
struct Stored {
  at::Tensor values;
  Format format;
  at::Tensor extra = {};
};

// Allocates tensors and fills them in run(). Until then the results hold no values.
class Conversions {
 public:
  // Allocates a state of `param` with these sizes and every value `fill`. It has the parameter's strides where it has
  // its shape. Without a dtype it takes the parameter's. Returns the state, and its scales if it has codes.
  std::tuple<at::Tensor, std::optional<at::Tensor>> new_state(const at::Tensor& param,
                                                              const std::vector<int64_t>& sizes,
                                                              std::optional<at::ScalarType> dtype, double fill);

  // Converts `state`, with its scales if it has any, to a state of `param` of that dtype. Throws UserError for scales
  // that do not fit.
  std::tuple<at::Tensor, std::optional<at::Tensor>> converted_state(const at::Tensor& param, const at::Tensor& state,
                                                                    const std::optional<at::Tensor>& scales,
                                                                    at::ScalarType dtype);

  // Allocates the companion of `param` with this dtype; `before` is its companion so far. May round the parameter
  // again. Throws UserTypeError for a dtype that no companion of such a parameter has.
  at::Tensor new_extra(const at::Tensor& param, const std::optional<at::Tensor>& before, at::ScalarType dtype);

  // Allocates a step counter, or a scalar of the state, with that value.
  at::Tensor new_counter(at::Device device, at::ScalarType dtype, double value = 0);

  // Writes values into a parameter, and returns the companion of that dtype with the rounding error.
  at::Tensor stored_param(const at::Tensor& param, const at::Tensor& values, at::ScalarType dtype);

  // Runs all collected conversions. Needs no GIL.
  void run();

  // Converts `from` to `to`, or fills `to` where from.values is undefined. Both must have the same dense layout. -1
  // counts the elements of `to`; packed ones share bytes.
  void add(Stored from, Stored to, double fill = 0, int64_t numel = -1);

 private:
  struct Pair {
    Stored from, to;
    double fill;
    int64_t numel;
  };
  // run() copies `copy` to `original`, which has another layout.
  struct WriteBack {
    at::Tensor original, copy;
  };

  void rewrite_param(const at::Tensor& param, Stored from, const at::Tensor& extra);
  static void run_on_cpu(const std::vector<Conversion>& jobs, int64_t num_chunks);
  static void run_on_cuda(const std::vector<Conversion>& jobs, int64_t num_chunks, c10::Device device);

  std::vector<Pair> pairs_;
  std::vector<WriteBack> write_backs_;
};

// Throws UserError unless the scales fit this state, and the state the parameter if a byte has two values.
void check_scales(const at::Tensor& state, const std::optional<at::Tensor>& scales,
                  const std::optional<at::Tensor>& param);

// Return the values of a state and of a parameter, including its companion, as float32. They have the state's shape and
// strides. Where a byte has two values they are shaped as `param`, or a vector in memory order without it.
at::Tensor load_state(const at::Tensor& state, const std::optional<at::Tensor>& scales,
                      const std::optional<at::Tensor>& param = {});
at::Tensor load_param(const at::Tensor& param, const std::optional<at::Tensor>& extra);

}  // namespace drivetrain::formats
