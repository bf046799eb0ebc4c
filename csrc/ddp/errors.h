// Declares the reducer's checks of parameters and gradients, and the errors that they raise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "ddp/parameter.h"

namespace drivetrain::ddp {

// Autograd carries errors from hooks to Python and keeps the type of torch's own errors only.
[[noreturn]] inline void throw_unsupported(const std::string& message) {
  C10_THROW_ERROR(NotImplementedError, message);
}
[[noreturn]] inline void throw_value_error(const std::string& message) { C10_THROW_ERROR(ValueError, message); }
[[noreturn]] inline void throw_type_error(const std::string& message) { C10_THROW_ERROR(TypeError, message); }

// Joins the first ten names with commas and counts the rest.
std::string joined(const std::vector<std::string>& names);

// The message of the last error that left the reducer.
class LastError {
 public:
  // Runs `body`, and keeps the message of an exception that it throws.
  template <class Body>
  void note(Body&& body) {
    try {
      std::forward<Body>(body)();
    } catch (...) {
      keep();
      throw;
    }
  }
  const std::string& message() const { return message_; }

 private:
  void keep();  // within a catch block

  std::string message_;  // empty: none
};

// Throws if the parameter's gradient accumulator was replaced, as module.to(dtype) does. The reducer's hook sits on the
// old one, so that nothing would be reduced.
void check_hooked(const Parameter& param);

// Removes the parameters that require a gradient now, and returns their names.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
std::vector<std::string> take_unfrozen(NamedTensors& frozen);

// Throws unless the gradient has the parameter's shape and device, this dtype, and the expected layout.
void check_gradient(const Parameter& param, const at::Tensor& grad, at::ScalarType expected);

// Says that a hook consumed this rank's own gradient, or may have: the replicas would diverge. what: "was changed".
std::string consumed_message(const Parameter& param, const std::string& what);

// Describes which parameters of a step got no gradient.
struct MissingGradients {
  std::string rank;             // "rank 3"
  std::vector<size_t> indices;  // of the parameters
  bool static_graph = false;    // the first step of a static graph has been counted
  bool finds_unused = false;    // find_unused_parameters=True
};
// Contains the text of torch's own reducer where other libraries search for it, and the parameters' names.
[[noreturn]] void fail_incomplete(const Parameters& params, const MissingGradients& missing);

[[noreturn]] void fail_changed_graph(const Parameter& param, int fired, int expected);
[[noreturn]] void fail_second_gradient(const Parameter& param);
[[noreturn]] void fail_outside_window();

}  // namespace drivetrain::ddp
