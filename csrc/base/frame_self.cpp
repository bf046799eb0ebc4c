// A Python method's own object, read from the frame of a thread that may be anywhere in it.
#include "base/frame_self.h"

#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#elif PY_VERSION_HEX < 0x030C0000
// Python 3.11 alone keeps a frame's variables where only its own headers say.
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace py = pybind11;

namespace drivetrain {

// Not through frame.f_locals: before Python 3.13 that fills a dict which belongs to the frame, which locals() and pdb
// hold too, and which keeps alive whatever the frame lets go of.
py::object frame_self(py::handle object) {
  if (!PyFrame_Check(object.ptr())) throw py::type_error("frame_self takes a frame");
  auto* frame = reinterpret_cast<PyFrameObject*>(object.ptr());
#if PY_VERSION_HEX < 0x030B0000
  PyObject* first = frame->f_localsplus[0];
#elif PY_VERSION_HEX < 0x030C0000
  PyObject* first = frame->f_frame->localsplus[0];
#else
  py::object held = py::reinterpret_steal<py::object>(PyFrame_GetVarString(frame, "self"));
  if (!held) PyErr_Clear();  // deleted, or not yet there
  PyObject* first = held.ptr();
#endif
  if (first != nullptr && PyCell_Check(first)) first = PyCell_GET(first);  // a function inside the method uses it
  return first == nullptr ? py::none() : py::reinterpret_borrow<py::object>(first);
}

}  // namespace drivetrain
