// Reads `self` from a Python method's frame, wherever its thread is in the method.
#include "base/frame_self.h"

#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#elif PY_VERSION_HEX < 0x030C0000
// Only Python 3.11 hides a frame's variables behind internal headers.
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace py = pybind11;

namespace drivetrain {

// This avoids frame.f_locals. Before Python 3.13 reading it fills a dict that belongs to the frame and that locals()
// and pdb share. That dict would keep objects alive after the frame has released them.
py::object frame_self(py::handle object) {
  if (!PyFrame_Check(object.ptr())) throw py::type_error("frame must be a Python frame object, got another type");
  auto* frame = reinterpret_cast<PyFrameObject*>(object.ptr());
#if PY_VERSION_HEX < 0x030B0000
  PyObject* first = frame->f_localsplus[0];
#elif PY_VERSION_HEX < 0x030C0000
  PyObject* first = frame->f_frame->localsplus[0];
#else
  py::object held = py::reinterpret_steal<py::object>(PyFrame_GetVarString(frame, "self"));
  if (!held) PyErr_Clear();  // the variable is deleted or not yet assigned
  PyObject* first = held.ptr();
#endif
  if (first != nullptr && PyCell_Check(first)) first = PyCell_GET(first);  // a nested function refers to it
  return first == nullptr ? py::none() : py::reinterpret_borrow<py::object>(first);
}

}  // namespace drivetrain
