// Declares the scopes that start and end a recorded pass: a call of a module, and a `with` statement.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "budget/recorder/recorder.h"

namespace drivetrain::budget {

// Replaces a module's `_compiled_call_impl`, which nn.Module calls instead of its own implementation and leaves out of
// copies. Records each call as a pass, or notes the module of each operation. A destructor ends both, so that neither
// outlives the call even after a KeyboardInterrupt, which skips the hooks of modules.
class ModuleCall {
 public:
  // index: the module index to record operations with; none: the call is a pass.
  ModuleCall(std::shared_ptr<Recorder> recorder, pybind11::object module, std::optional<int32_t> index);

  // The module must be alive.
  void install();
  // Restores the module's calls. Safe to call twice, and before or after the removal of calls installed later.
  void remove();

  pybind11::object operator()(const pybind11::args& args, const pybind11::kwargs& kwargs) const;
  const pybind11::object& inner() const { return inner_; }

  int traverse(visitproc visit, void* arg) const;
  void clear() { inner_ = pybind11::none(); }

 private:
  pybind11::object target() const;

  const std::shared_ptr<Recorder> recorder_;
  const pybind11::weakref module_;
  const std::optional<int32_t> index_;
  pybind11::object inner_ = pybind11::none();  // what install() replaced; None: nothing
  bool is_removed_ = false;
};

// Records a `with` block as a pass.
class PassScope {
 public:
  explicit PassScope(std::shared_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {}

  void enter();
  void exit(bool is_complete);

 private:
  const std::shared_ptr<Recorder> recorder_;
  // Per thread, nested ones later.
  std::vector<std::pair<std::thread::id, std::shared_ptr<RecordedPass>>> entered_;
};

void register_calls(pybind11::module_& m);

}  // namespace drivetrain::budget
