// Records calls of modules and `with` blocks as passes. Destructors end these, so that none outlives its call even
// after a KeyboardInterrupt, which skips the hooks of modules.
#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/frame_self.h"
#include "budget/budget.h"
#include "budget/recorder/recorder.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

constexpr const char* kAttribute = "_compiled_call_impl";

// Records a pass as long as the object lives.
class PassGuard {
 public:
  explicit PassGuard(Recorder& recorder) : recorder_(recorder), pass_(recorder.enter()) {}
  ~PassGuard() {
    if (!has_left_) recorder_.leave(pass_, /*is_complete=*/false);
  }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;

  void leave() {
    has_left_ = true;
    recorder_.leave(pass_, /*is_complete=*/true);
  }

 private:
  Recorder& recorder_;
  const std::shared_ptr<RecordedPass> pass_;
  bool has_left_ = false;
};

class ModuleGuard {
 public:
  ModuleGuard(Recorder& recorder, int32_t module) : recorder_(recorder), before_(recorder.module()) {
    recorder.set_module(module);
  }
  ~ModuleGuard() { recorder_.set_module(before_); }
  ModuleGuard(const ModuleGuard&) = delete;
  ModuleGuard& operator=(const ModuleGuard&) = delete;

 private:
  Recorder& recorder_;
  const int32_t before_;
};

// Returns whether a pass can begin. Without gradients autograd saves nothing, torch.func transforms allow no hooks, and
// a compiler's tracing run is not a pass.
bool can_record() {
  static const auto* is_compiling =
      new py::object(py::module_::import("torch.compiler").attr("is_compiling"));  // leaked: it may outlive Python
  return c10::GradMode::is_enabled() && at::SavedTensorDefaultHooks::is_enabled() && !(*is_compiling)().cast<bool>();
}

py::object called(const py::object& function, const py::args& args, const py::kwargs& kwargs) {
  auto result = py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
  if (!result) throw py::error_already_set();
  return result;
}

// Bypasses the attribute access of torch.compile's wrapper of a module.
py::dict attributes_of(const py::object& module) {
  return py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(module.ptr(), nullptr));
}

py::object attribute_in(const py::dict& attributes) {
  PyObject* found = PyDict_GetItemString(attributes.ptr(), kAttribute);
  return found == nullptr ? py::none() : py::reinterpret_borrow<py::object>(found);
}

// Returns the module whose call runs, read from the frame of nn.Module's own function; None: another function calls.
py::object caller() {
  static const auto* code = new py::object(
      py::module_::import("torch").attr("nn").attr("Module").attr("_wrapped_call_impl").attr("__code__"));  // leaked,
                                                                                                            // too
  PyFrameObject* innermost = PyThreadState_GetFrame(PyThreadState_Get());
  if (innermost == nullptr) return py::none();
  const auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(innermost));
  const auto its_code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(innermost)));
  return its_code.is(*code) ? frame_self(frame) : py::none();
}

bool is_constructed(PyObject* self) {
  return reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().holder_constructed();
}

// Replaces a module's `_compiled_call_impl`, which nn.Module calls instead of its own implementation and leaves out of
// copies. Records each call as a pass, or notes the module of each operation.
class ModuleCall {
 public:
  // index: the module index to record operations with; none: the call is a pass.
  ModuleCall(std::shared_ptr<Recorder> recorder, py::object module, std::optional<int32_t> index)
      : recorder_(std::move(recorder)), module_(module), index_(index) {}

  // The module must be alive.
  void install() {
    const auto module = py::reinterpret_borrow<py::object>(module_());
    const py::dict attributes = attributes_of(module);
    inner_ = attribute_in(attributes);
    attributes[kAttribute] = py::cast(this);
  }

  // Restores the module's calls. Safe to call twice, and before or after the removal of calls installed later.
  void remove() {
    is_removed_ = true;
    const py::object module = module_();
    if (module.is_none()) return;
    const py::dict attributes = attributes_of(module);
    py::object outermost = attribute_in(attributes);
    while (py::isinstance<ModuleCall>(outermost) && outermost.cast<ModuleCall&>().is_removed_) {
      outermost = outermost.cast<ModuleCall&>().inner_;
      if (outermost.is_none()) {
        PyDict_DelItemString(attributes.ptr(), kAttribute);
      } else {
        attributes[kAttribute] = outermost;
      }
    }
  }

  py::object operator()(const py::args& args, const py::kwargs& kwargs) const {
    const std::shared_ptr<Recorder> recorder = recorder_;
    const py::object function = target();
    if (is_removed_) return called(function, args, kwargs);
    if (index_) {
      const ModuleGuard module(*recorder, *index_);
      return called(function, args, kwargs);
    }
    if (!can_record()) return called(function, args, kwargs);
    PassGuard pass(*recorder);
    py::object result = called(function, args, kwargs);
    pass.leave();
    return result;
  }

  const py::object& inner() const { return inner_; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(inner_.ptr());
    return 0;
  }
  void clear() { inner_ = py::none(); }

 private:
  py::object target() const {
    if (!inner_.is_none()) return inner_;
    const py::object module = module_();
    // A replica of nn.DataParallel shares the attributes of the original module, but its call must run the replica.
    const py::object self = caller();
    return (self.is_none() ? module : self).attr("_call_impl");
  }

  const std::shared_ptr<Recorder> recorder_;
  const py::weakref module_;
  const std::optional<int32_t> index_;
  py::object inner_ = py::none();  // what install() replaced; None: nothing
  bool is_removed_ = false;
};

// Records a `with` block as a pass.
class PassScope {
 public:
  explicit PassScope(std::shared_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {}

  void enter() { entered_.emplace_back(std::this_thread::get_id(), recorder_->enter(/*must_record=*/true)); }

  void exit(bool is_complete) {
    const auto last = std::find_if(entered_.rbegin(), entered_.rend(),
                                   [](const auto& entered) { return entered.first == std::this_thread::get_id(); });
    if (last == entered_.rend()) return;
    const std::shared_ptr<RecordedPass> pass = std::move(last->second);
    entered_.erase(std::next(last).base());
    recorder_->leave(pass, is_complete);
  }

 private:
  const std::shared_ptr<Recorder> recorder_;
  // Per thread, nested ones later.
  std::vector<std::pair<std::thread::id, std::shared_ptr<RecordedPass>>> entered_;
};

}  // namespace

void register_calls(py::module_& m) {
  py::class_<ModuleCall>(m, "ActivationCall", py::custom_type_setup([](PyHeapTypeObject* heap_type) {
                           // `inner` may refer to the module, which refers to this object.
                           PyTypeObject& type = heap_type->ht_type;
                           type.tp_flags |= Py_TPFLAGS_HAVE_GC;
                           type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
                             Py_VISIT(Py_TYPE(self));
                             if (!is_constructed(self)) return 0;
                             return py::cast<ModuleCall&>(py::handle(self)).traverse(visit, arg);
                           };
                           type.tp_clear = [](PyObject* self) {
                             if (is_constructed(self)) py::cast<ModuleCall&>(py::handle(self)).clear();
                             return 0;
                           };
                         }))
      .def(py::init<std::shared_ptr<Recorder>, py::object, std::optional<int32_t>>(), py::arg("recorder"),
           py::arg("module"), py::arg("index") = py::none())
      .def("__call__", &ModuleCall::operator())
      .def("install", &ModuleCall::install)
      .def("remove", &ModuleCall::remove)
      .def_property_readonly("inner", &ModuleCall::inner)
      // Some classes copy all attributes of a module. Their copies get None, as if nothing had been installed.
      .def("__reduce__", [](const py::object&) { return py::make_tuple(py::type::of(py::none()), py::tuple()); })
      .def("__deepcopy__", [](const py::object&, const py::object&) { return py::none(); }, py::arg("memo"));
  py::class_<PassScope>(m, "ActivationScope")
      .def(py::init<std::shared_ptr<Recorder>>(), py::arg("recorder"))
      .def("__enter__",
           [](py::object self) {
             self.cast<PassScope&>().enter();
             return self;
           })
      .def("__exit__", [](PassScope& scope, const py::object& kind, const py::object&, const py::object&) {
        scope.exit(kind.is_none());
      });
}

}  // namespace drivetrain::budget
