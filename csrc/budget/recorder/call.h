// What is recorded, from where to where: a module's call, or what is inside a with statement.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "budget/recorder/record.h"

namespace drivetrain::budget {

// Stands in a module's `_compiled_call_impl`, which nn.Module calls in place of its own implementation and leaves out
// of copies. Records each call as a pass, or notes operations for a module. A destructor ends both, so that neither
// outlives the call, whatever ends that and wherever Python was: no hook of a module is called after a
// KeyboardInterrupt.
class Call {
 public:
  // index: of the module that operations are noted for; none: the call is a pass. The module must not have gone.
  Call(std::shared_ptr<Recorder> recorder, pybind11::object module, std::optional<int32_t> index);

  void install();
  // The module's calls go by without it; safe to call twice, in any order with those that were installed later.
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
  pybind11::object inner_ = pybind11::none();  // that was there before; None: nothing
  bool is_removed_ = false;
};

// A pass from `with` to its end, whatever ends that.
class Scope {
 public:
  explicit Scope(std::shared_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {}

  void enter();
  void exit(bool is_whole);

 private:
  const std::shared_ptr<Recorder> recorder_;
  std::vector<std::pair<std::thread::id, Recorder::Entry>> entries_;  // of with statements, in each thread nested
};

void register_calls(pybind11::module_& m);

}  // namespace drivetrain::budget
