// Defines the native module drivetrain._C: registers each topic and translates C++ exceptions into Python exceptions.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "base/check.h"
#include "base/cpu_isa.h"
#include "base/cuda_versions.h"
#include "base/frame_self.h"
#include "base/heap.h"
#include "base/host_pages.h"
#include "base/write_cuda.h"
#include "budget/budget.h"
#include "checkpointing/checkpointing.h"
#include "ddp/ddp.h"
#include "grad/grad.h"
#include "optim/optim.h"
#include "recompute/recompute.h"
#include "saved_tensors/saved_tensors.h"
#include "trace/trace.h"

namespace py = pybind11;

namespace drivetrain {
namespace {

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const UserTypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const UnsupportedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what());
  } catch (const InvariantError& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (python_error& e) {  // torch wraps a Python exception that passes through it
    e.restore();
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  }
}

void register_base(py::module_& m) {
  m.def("frame_self", &frame_self, py::arg("frame"));
  m.def("isa", [] { return std::string(name_of(chosen_isa())); });
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
    return names;
  });
  m.def("force_isa", &force_isa, py::arg("name"));
  // Returns the versions of the module's CUDA runtime and of the newest runtime that the driver supports; 0: none.
  m.def("cuda_versions", [] {
    const CudaVersions versions = cuda_versions();
    return std::pair(versions.runtime, versions.driver);
  });
  m.def("return_freed_memory", &return_freed_memory);
  m.def("leave_captures", &leave_captures);
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<HostPages, std::shared_ptr<HostPages>>(m, "HostPages")
      .def(py::init(&HostPages::make), py::arg("bytes"))
      .def("lock", &HostPages::lock, py::arg("bytes"), no_gil())
      .def("tensor", &HostPages::tensor)
      .def_property_readonly("size", &HostPages::size)
      .def_property_readonly("locked_bytes", &HostPages::locked_bytes)
      .def_property_readonly("has_tensors", &HostPages::has_tensors);
}

}  // namespace
}  // namespace drivetrain

PYBIND11_MODULE(_C, m) {
  m.doc() = "drivetrain's native core";
  py::register_exception_translator(&drivetrain::translate);
  drivetrain::register_base(m);
  drivetrain::grad::register_grad(m);
  drivetrain::optim::register_optim(m);
  drivetrain::ddp::register_ddp(m);
  drivetrain::recompute::register_checkpoint(m);
  drivetrain::checkpointing::register_checkpointing(m);
  drivetrain::budget::register_recorder(m);
  drivetrain::budget::register_solver(m);
  drivetrain::saved_tensors::register_pack(m);
  drivetrain::saved_tensors::register_offload(m);
  drivetrain::trace::register_trace(m);
}
