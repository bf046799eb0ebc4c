// Python's view of the reducer: the methods that torch's DistributedDataParallel calls on its own, under the same
// names.
#include "ddp/ddp.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "base/check.h"
#include "ddp/comm.h"
#include "ddp/plan.h"
#include "ddp/reducer.h"

namespace py = pybind11;

namespace drivetrain::ddp {
namespace {

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> params, std::vector<std::string> names,
                                      std::shared_ptr<Comm> comm, std::vector<int64_t> bucket_caps,
                                      bool find_unused_parameters) {
  return Reducer::make(std::move(params), std::move(names), std::move(comm),
                       {std::move(bucket_caps), find_unused_parameters});
}

std::shared_ptr<Comm> torch_comm(const std::string& process_group, const std::string& device) {
  return make_torch_comm(process_group, c10::Device(device).type());
}

std::shared_ptr<Comm> shm_comm(const std::string& process_group, std::vector<int64_t> hosts, const std::string& leaders,
                               double timeout_s) {
  return make_shm_comm({process_group, std::move(hosts), leaders, timeout_s});
}

void all_reduce(Comm& comm, const at::Tensor& flat, bool mean) {
  if (flat.dim() != 1 || !flat.is_contiguous() || flat.is_complex()) {
    throw UserError(
        text("tensor is ", flat.scalar_type(), " ", flat.sizes(), ", expected a flat, real, contiguous one"));
  }
  if (mean && (!comm.averages() || !flat.is_floating_point())) {
    throw UserError(text("the mean of ", flat.scalar_type(), " by transport '", comm.name(), "' is not to be had"));
  }
  (mean ? comm.start(flat) : comm.start_sum(flat))->wait();
}

// The plan as plain lists, for tests: [(group, bytes, [(param, offset), ...]), ...].
py::list plan(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& sizes, const std::vector<int64_t>& order,
              const std::vector<int64_t>& caps) {
  std::vector<ParamSize> params;
  for (const auto& [numel, element_bytes, group] : sizes) params.push_back({numel, element_bytes, group});
  py::list result;
  for (const BucketPlan& bucket : plan_buckets(params, order, caps)) {
    py::list slots;
    for (const Slot& slot : bucket.slots) slots.append(py::make_tuple(slot.param, slot.offset));
    result.append(py::make_tuple(bucket.group, bucket.bytes, slots));
  }
  return result;
}

}  // namespace

void register_ddp(py::module_& m) {
  // Calls release the GIL: an autograd thread that holds the reducer's mutex may want the GIL.
  using no_gil = py::call_guard<py::gil_scoped_release>;
  m.def("plan_buckets", &plan, py::arg("sizes"), py::arg("order"), py::arg("caps"));
  py::class_<Reducer::BucketInfo>(m, "BucketInfo")
      .def_readonly("names", &Reducer::BucketInfo::names)
      .def_readonly("bytes", &Reducer::BucketInfo::bytes)
      .def_readonly("dtype", &Reducer::BucketInfo::dtype);
  py::class_<Comm, std::shared_ptr<Comm>>(m, "Comm")
      .def_property_readonly("name", &Comm::name)
      .def_property_readonly("why_not", &Comm::why_not)
      .def_property_readonly("averages", &Comm::averages)
      .def(
          "allocate", [](Comm& comm, int64_t bytes) { return comm.allocate(bytes, at::kCPU); }, py::arg("bytes"),
          no_gil())
      .def("all_reduce", &all_reduce, py::arg("flat"), py::arg("mean"), no_gil());
  m.def("torch_comm", &torch_comm, py::arg("process_group"), py::arg("device"), no_gil());
  m.def("shm_comm", &shm_comm, py::arg("process_group"), py::arg("hosts"), py::arg("leaders"), py::arg("timeout_s"),
        no_gil());
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init(&make_reducer), py::kw_only(), py::arg("params"), py::arg("names"), py::arg("comm"),
           py::arg("bucket_caps"), py::arg("find_unused_parameters"), no_gil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), no_gil())
      .def("buckets", &Reducer::buckets, no_gil())
      .def("arena_bytes", &Reducer::arena_bytes)
      .def("_check_reducer_finalized", &Reducer::check_finalized, no_gil())
      .def("_get_local_used_map", &Reducer::local_used_map, no_gil())
      .def("_remove_autograd_hooks", &Reducer::remove_autograd_hooks, no_gil())
      // torch's wrapper calls these two at every forward; there is nothing to do.
      .def("prepare_for_forward", [](Reducer&) {})
      .def("_rebuild_buckets", [](Reducer&) { return false; });
}

}  // namespace drivetrain::ddp
