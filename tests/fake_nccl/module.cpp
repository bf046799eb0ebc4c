// Binds the NCCL transport over the fakes as a Python module. It runs DistributedDataParallel on CPU tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>

#include "base/current_stream.h"
#include "base/write_cuda.h"
#include "ddp/transport/nccl/nccl_api.h"
#include "ddp/transport/transport.h"

namespace drivetrain {

void* current_stream(c10::Device) { return nullptr; }
bool is_capturing(void*) { return false; }

}  // namespace drivetrain

PYBIND11_MODULE(fake_nccl, m) {
  namespace py = pybind11;
  namespace ddp = drivetrain::ddp;
  py::module_::import("drivetrain._C");  // registers Comm
  m.def(
      "nccl_comm",
      [](const std::string& library, const std::string& process_group, double timeout_s) -> std::shared_ptr<ddp::Comm> {
        const auto release_cache = [] { ::setenv("FAKE_NCCL_FREED", "1", 1); };
        return ddp::make_nccl_comm(
            {ddp::open_nccl(library), process_group, c10::Device(c10::kCPU), timeout_s, release_cache});
      },
      py::arg("library"), py::arg("process_group"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>());
  m.def("nccl_memory_bytes", &ddp::nccl_memory_bytes);
}
