// Declares the functions that register the storage formats of saved tensors with Python: packing and offloading.
#pragma once

#include <pybind11/pybind11.h>

namespace drivetrain::saved_tensors {

void register_pack(pybind11::module_& m);
void register_offload(pybind11::module_& m);

}  // namespace drivetrain::saved_tensors
