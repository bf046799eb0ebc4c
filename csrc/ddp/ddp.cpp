// Binds the reducer and its transports to Python, under the names that torch's DistributedDataParallel calls.
#include "ddp/ddp.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/held_function.h"
#include "base/torch_text.h"
#include "ddp/bucket_plan.h"
#include "ddp/progress.h"
#include "ddp/reducer.h"
#include "ddp/transport/processes.h"
#include "ddp/transport/shm/shm_segment.h"
#include "ddp/transport/transport.h"

namespace py = pybind11;

namespace drivetrain::ddp {
namespace {

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> params, std::vector<std::string> names,
                                      std::shared_ptr<Comm> comm, std::vector<int64_t> bucket_caps,
                                      bool find_unused_parameters, bool skip_unused_buckets, std::vector<bool> sparse,
                                      int64_t check_replicas_every, NamedTensors frozen, bool plan_from_measurement,
                                      std::string wrapper, bool gradients_stay_views, int64_t logical_ranks) {
  const py::gil_scoped_release no_gil;
  return Reducer::make(
      std::move(params), std::move(names), std::move(comm),
      {std::move(bucket_caps), find_unused_parameters, skip_unused_buckets, std::move(sparse), check_replicas_every,
       plan_from_measurement, std::move(wrapper), gradients_stay_views, logical_ranks, std::move(frozen)});
}

// torch's own class gives Python's hooks a real dist.GradBucket.
void set_python_hook(Reducer& reducer, py::object state, py::object hook, std::vector<int64_t> first_caps) {
  auto native = std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
  const py::gil_scoped_release no_gil;
  reducer.set_hook(std::move(native), std::move(first_caps));
}

// Returns the Python function as one for native code, which calls it without the GIL.
template <class Result, class... Args>
std::function<Result(Args...)> native_call(py::function function) {
  return [held = hold(std::move(function))](Args... args) {
    const py::gil_scoped_acquire gil;
    return (*held)(args...).template cast<Result>();
  };
}

// Binds a method that takes a function, for one of Python.
template <class Result, class... Args>
auto taking_function(void (ReducerState::*method)(std::function<Result(Args...)>)) {
  return [method](Reducer& reducer, py::function function) {
    auto call = native_call<Result, Args...>(std::move(function));
    const py::gil_scoped_release no_gil;
    (reducer.*method)(std::move(call));
  };
}

void set_on_reduced(Reducer& reducer, std::optional<py::function> on_reduced) {
  BucketQueue::OnReduced call;
  if (on_reduced) call = native_call<void, const std::vector<size_t>&, bool>(std::move(*on_reduced));
  const py::gil_scoped_release no_gil;
  reducer.set_on_reduced(std::move(call));
}

using PlainRanges = std::vector<std::tuple<int64_t, int64_t, std::vector<int>>>;  // begin, end, ranks

RankRanges rank_ranges(const PlainRanges& plain) {
  RankRanges ranges;
  for (const auto& [begin, end, ranks] : plain) {
    DT_INVARIANT(!ranks.empty());
    ranges.push_back({begin, end, ranks[0], {ranks.begin() + 1, ranks.end()}});
  }
  return ranges;
}

// kept: by parameter, (begin, end, ranks) in elements.
void set_kept(Reducer& reducer, const std::vector<PlainRanges>& kept) {
  std::vector<RankRanges> ranges;
  std::transform(kept.begin(), kept.end(), std::back_inserter(ranges), rank_ranges);
  reducer.set_kept(std::move(ranges));
}

std::shared_ptr<Comm> torch_comm(const std::string& process_group, const std::string& backend,
                                 std::vector<int64_t> ranks, bool in_tree) {
  return make_torch_comm(process_group, backend, Ranks(std::move(ranks)), in_tree);
}

std::shared_ptr<Comm> wire_comm(const std::string& process_group, const std::string& returning, at::ScalarType dtype,
                                std::vector<int64_t> ranks) {
  DT_INVARIANT(dtype == at::kBFloat16 || dtype == at::kFloat8_e5m2 || dtype == at::kFloat);
  const WireFormat rounded = dtype == at::kBFloat16 ? WireFormat::kBFloat16 : WireFormat::kFloat8;
  const WireFormat format = dtype == at::kFloat ? WireFormat::kExact : rounded;
  return make_wire_comm(process_group, returning, format, Ranks(std::move(ranks)));
}

std::shared_ptr<Comm> shm_comm(const std::string& process_group, std::vector<int64_t> hosts,
                               std::shared_ptr<Comm> group, std::shared_ptr<Comm> leaders, double timeout_s,
                               std::vector<int64_t> ranks, bool in_tree) {
  return make_shm_comm({process_group, std::move(hosts), std::move(group), std::move(leaders), timeout_s,
                        Ranks(std::move(ranks)), in_tree});
}

std::pair<std::string, std::string> nccl_library(const std::string& fallback) {
  return path_and_version(*find_nccl(fallback));
}

std::shared_ptr<Comm> nccl_comm(const std::string& process_group, const std::string& device, double timeout_s,
                                const std::string& fallback, std::vector<int64_t> ranks, bool in_tree) {
  const c10::Device on(device);
  const auto release_cache = [on] { c10::getDeviceAllocator(on.type())->emptyCache(); };
  return make_nccl_comm(
      {find_nccl(fallback), process_group, on, timeout_s, release_cache, Ranks(std::move(ranks)), in_tree});
}

py::bytes address_bytes(const ShmSegment::Address& address) {
  return {reinterpret_cast<const char*>(&address), sizeof(address)};
}

// Opens the lines of the ranks of this host. addresses: by rank within the host.
// ranks: the process group's ranks on this host. hosts: each host's first rank; empty: hosts compare nothing. between:
// the process group of these; "" on other ranks.
std::shared_ptr<TagBoard> make_tag_board(std::shared_ptr<ShmSegment> own, const std::vector<std::string>& addresses,
                                         int rank, std::vector<uint64_t> ranks, std::vector<std::string> rank_names,
                                         const std::string& between, std::vector<uint64_t> hosts, double timeout_s) {
  struct Memory {
    std::shared_ptr<ShmSegment> own;
    std::vector<ShmSegment> others;
  };
  const auto memory = std::make_shared<Memory>(Memory{own, {}});
  TagBoard::Options options;
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (static_cast<int>(i) == rank) {
      options.lines.push_back(own->data());
      continue;
    }
    ShmSegment::Address address;
    DT_INVARIANT(addresses[i].size() == sizeof(address));
    std::memcpy(&address, addresses[i].data(), sizeof(address));
    if (address.bytes != TagBoard::line_bytes()) {
      throw EnvironmentError(text(rank_names.at(ranks.at(i)), " has no line for a board of tags"));
    }
    options.lines.push_back(memory->others.emplace_back(ShmSegment::open(address)).data());
    if (i == 0 && !hosts.empty()) {
      const auto first = std::make_shared<const PeerProcess>(address.pid);
      options.has_first_rank_ended = [first] { return first->has_ended(); };
    }
  }
  options.rank = rank;
  options.memory = memory;
  options.rank_names = std::move(rank_names);
  options.ranks = std::move(ranks);
  options.limit = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  options.do_hosts_agree = !hosts.empty();
  if (!between.empty()) {
    options.agreement = std::make_unique<HostAgreement>(make_host_exchange(between), std::move(hosts));
  }
  return std::make_shared<TagBoard>(std::move(options));
}

void all_reduce(Comm& comm, const at::Tensor& flat, bool mean) {
  if (flat.dim() != 1 || !flat.is_contiguous() || flat.is_complex()) {
    throw UserError(
        text("tensor is ", flat.scalar_type(), " ", flat.sizes(), ", expected a flat, real, contiguous one"));
  }
  if (mean && (!comm.averages() || !flat.is_floating_point())) {
    throw UserError(
        text("mean is true, but transport '", comm.name(), "' has no mean of ", flat.scalar_type(), ": pass false"));
  }
  (mean ? comm.start_mean(flat, std::nullopt, nullptr) : comm.start_sum(flat))->wait();
}

// Ranges in bytes as Python keeps them between gathers.
struct HeldRanges {
  std::shared_ptr<const RankRanges> ranges;
};

// Rounding errors that the transport keeps as long as Python does; null: it keeps none.
struct HeldErrors {
  std::shared_ptr<void> errors;
};

// Returns null if the transport cannot gather that tensor.
std::unique_ptr<PendingReduce> start_gather(Comm& comm, const at::Tensor& flat, const HeldRanges& held) {
  for (const RankRange& range : *held.ranges) {
    DT_INVARIANT(range.begin >= 0 && range.begin <= range.end && range.end <= static_cast<int64_t>(flat.nbytes()));
    DT_INVARIANT(range.rank >= 0 && range.rank < comm.size());
  }
  return comm.start_gather(flat, held.ranges);
}

using PlainSizes = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<ParamSize> param_sizes(const PlainSizes& sizes) {
  std::vector<ParamSize> params;
  for (const auto& [numel, element_bytes, group] : sizes) params.push_back({numel, element_bytes, group});
  return params;
}

// Returns a plan as plain lists, for tests: [(group, bytes, [(param, offset), ...]), ...].
py::list plain(const std::vector<BucketPlan>& buckets) {
  py::list result;
  for (const BucketPlan& bucket : buckets) {
    py::list entries;
    for (const BucketEntry& entry : bucket.entries) entries.append(py::make_tuple(entry.param, entry.offset));
    result.append(py::make_tuple(bucket.group, bucket.bytes, entries));
  }
  return result;
}

py::list plan(const PlainSizes& sizes, const std::vector<int64_t>& order, const std::vector<int64_t>& caps) {
  return plain(plan_buckets(param_sizes(sizes), order, caps));
}

// Returns a plan with the seconds at which each bucket's all-reduce is expected to end.
py::tuple plan_measured(const PlainSizes& sizes, const std::vector<int64_t>& order, const std::vector<double>& ready,
                        const std::vector<std::pair<int64_t, double>>& costs, bool in_background) {
  Costs native{{}, in_background};
  for (const auto& [bytes, seconds] : costs) native.points.push_back({bytes, seconds});
  const std::vector<ParamSize> params = param_sizes(sizes);
  const std::vector<BucketPlan> buckets = cut_buckets(params, order, choose_cuts(params, order, ready, native));
  std::vector<double> ends;
  for (const ExpectedBucket& bucket : expect(buckets, ready, native)) ends.push_back(bucket.end);
  return py::make_tuple(plain(buckets), ends);
}

// python/drivetrain/ddp/reducer.py adds the methods that need torch's Python objects.
void register_reducer(py::module_& m) {
  // Calls release the GIL: an autograd thread that holds the reducer's mutex may want the GIL. pybind11 registers a new
  // object within its constructor's call, so that constructors release it inside, around their work.
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init(&make_reducer), py::kw_only(), py::arg("params"), py::arg("names"), py::arg("comm"),
           py::arg("bucket_caps"), py::arg("find_unused_parameters"), py::arg("skip_unused_buckets"), py::arg("sparse"),
           py::arg("check_replicas_every"), py::arg("frozen"), py::arg("plan_from_measurement"), py::arg("wrapper"),
           py::arg("gradients_stay_views"), py::arg("logical_ranks"))
      // The phases of a step.
      .def("prepare_for_forward", &Reducer::prepare_for_forward, no_gil())
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs"), no_gil())
      .def("announce", &Reducer::announce, py::arg("outputs"), no_gil())
      .def("begin_weighted", &Reducer::begin_weighted, py::arg("weight"), py::arg("holds") = false, no_gil())
      .def("end_weighted", &Reducer::end_weighted, py::arg("failed"), no_gil())
      .def("reduce_collected", &Reducer::reduce_collected, no_gil())
      .def("end_part", &Reducer::end_part, py::arg("is_first"), no_gil())
      .def("_delay_all_reduce", &Reducer::delay_all_reduce, no_gil())
      .def(
          "_autograd_hook", [](Reducer& reducer, size_t index) { reducer.on_gradient(index); }, py::arg("index"),
          no_gil())
      .def("_remove_autograd_hooks", &Reducer::remove_autograd_hooks, no_gil())
      .def("_reset_state", &Reducer::reset_state, no_gil())
      .def("_check_reducer_finalized", &Reducer::check_finalized, no_gil())
      .def("settle_between_backwards", &Reducer::settle_between_backwards, no_gil())
      .def(
          "announce_buffers",
          [](Reducer& reducer) { reducer.announce_collective(Purpose::kBuffers, "the broadcast of buffers"); },
          no_gil())
      .def(
          "announce_agreement",
          [](Reducer& reducer) {
            reducer.announce_collective(Purpose::kAgreement, "the agreement on whether to synchronize, in join(),");
          },
          no_gil())
      .def("difference", &Reducer::difference, no_gil())
      .def("set_sync", &Reducer::set_sync, py::arg("sync"))
      .def("set_python_hook", &set_python_hook, py::arg("state"), py::arg("hook"), py::arg("first_caps"))
      .def("set_comm", &Reducer::set_comm, py::arg("comm"), no_gil())
      .def("set_connect", taking_function(&Reducer::set_connect), py::arg("connect"))
      .def("set_are_held", taking_function(&Reducer::set_are_held), py::arg("are_held"))
      .def("set_ended_ranks", taking_function(&Reducer::set_ended_ranks), py::arg("ended_ranks"))
      .def("set_on_moved", taking_function(&Reducer::set_on_moved), py::arg("on_moved"))
      .def("set_on_reduced", &set_on_reduced, py::arg("on_reduced"))
      .def("set_kept", &set_kept, py::arg("kept"), no_gil())
      .def("set_put_aside", taking_function(&Reducer::set_put_aside), py::arg("put_aside"))
      .def("weighted_total", &Reducer::weighted_total, no_gil())
      .def("note_found", &Reducer::note_found, py::arg("found"), py::arg("by_weighted"), no_gil())
      .def("add_end_callback", taking_function(&Reducer::add_end_callback), py::arg("callback"))
      .def(
          "set_gradient_check",
          [](Reducer& reducer, bool skips, double spike_factor) {
            using Mode = GradientCheck::Mode;
            reducer.with_checks([&](GradientCheck& check, auto&) {
              check.set_options({skips ? Mode::kSkip : Mode::kRaise, spike_factor});
            });
          },
          py::arg("skips"), py::arg("spike_factor"), no_gil())
      .def(
          "set_noise_every",
          [](Reducer& reducer, int64_t every) {
            reducer.with_checks([&](auto&, GradientNoise& noise) { noise.set_every(every); });
          },
          py::arg("every"), no_gil())
      .def(
          "gradient_noise",
          [](Reducer& reducer) {
            using Found = std::tuple<int64_t, int64_t, at::Tensor>;
            const auto norms = reducer.with_checks([](auto&, const GradientNoise& noise) { return noise.last(); });
            return norms ? std::optional(Found(norms->step, norms->ranks, norms->squares)) : std::nullopt;
          },
          no_gil())
      .def("_set_static_graph", &Reducer::set_static_graph, no_gil())
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward, no_gil())
      .def("_set_mixed_precision_param_dtype", &Reducer::set_mixed_precision, py::arg("dtype"), no_gil())
      // Ranks that have run out of inputs.
      .def("set_joining", &Reducer::set_joining, py::arg("divisor"), no_gil())
      .def("shadow_planning", &Reducer::shadow_planning, no_gil())
      .def("reduce_zeros", &Reducer::reduce_zeros, py::arg("bucket"), py::arg("as_sum"), no_gil())
      .def("wait_for_zeros", &Reducer::wait_for_zeros, py::arg("bucket"), py::arg("reduce"), no_gil())
      .def("_push_all_rebuilt_params", &Reducer::end_shadowed_step, no_gil())
      .def("times", &Reducer::times, no_gil())
      .def("progress", &Reducer::progress)
      .def("plan_report", &Reducer::plan_report, no_gil())
      .def("buckets", &Reducer::buckets, no_gil())
      .def("buffer_bytes", &Reducer::buffer_bytes, no_gil())
      .def("gradient_views", &Reducer::gradient_views, no_gil())
      .def("has_rebuilt_buckets", &Reducer::has_rebuilt_buckets, no_gil())
      .def(
          "skipped_steps",
          [](Reducer& reducer) {
            return reducer.with_checks([](const GradientCheck& check, auto&) { return check.skipped_steps(); });
          },
          no_gil())
      .def("last_error", &Reducer::last_error, no_gil())
      .def("is_graph_known", &Reducer::is_graph_known, no_gil())
      .def("_ddp_graph_static", &Reducer::has_graph_stayed_the_same, no_gil())
      .def("_get_local_used_map", &Reducer::used_map, no_gil());
}

}  // namespace

void register_ddp(py::module_& m) {
  // Calls release the GIL: an autograd thread that holds the reducer's mutex may want the GIL.
  using no_gil = py::call_guard<py::gil_scoped_release>;
  m.def("plan_buckets", &plan, py::arg("sizes"), py::arg("order"), py::arg("caps"));
  m.def("plan_measured_buckets", &plan_measured, py::arg("sizes"), py::arg("order"), py::arg("ready"), py::arg("costs"),
        py::arg("in_background"));
  py::class_<BucketInfo>(m, "BucketInfo")
      .def_readonly("names", &BucketInfo::names)
      .def_readonly("bytes", &BucketInfo::bytes)
      .def_readonly("dtype", &BucketInfo::dtype);
  py::class_<ShmSegment, std::shared_ptr<ShmSegment>>(m, "Segment")
      .def_property_readonly("address", [](const ShmSegment& segment) { return address_bytes(segment.address()); })
      .def_property_readonly_static("no_address", [](const py::object&) { return address_bytes({}); });
  py::class_<TagBoard, std::shared_ptr<TagBoard>>(m, "TagBoard")
      .def_property_readonly("has_all_ranks", &TagBoard::has_all_ranks)
      .def(
          "show_connection", [](TagBoard& board) { board.show({.purpose = Purpose::kConnection, .step = 1}); },
          no_gil());
  m.def("tag_line", [] { return std::make_shared<ShmSegment>(ShmSegment::create(TagBoard::line_bytes())); }, no_gil());
  m.def("tag_board", &make_tag_board, py::arg("own"), py::arg("addresses"), py::arg("rank"), py::arg("ranks"),
        py::arg("rank_names"), py::arg("between"), py::arg("hosts"), py::arg("timeout_s"), no_gil());
  py::class_<Comm, std::shared_ptr<Comm>>(m, "Comm")
      .def_property_readonly("name", py::cpp_function(&Comm::name, no_gil()))  // waits for a call that meets the ranks
      .def_property_readonly("why_not", &Comm::why_not)
      .def_property_readonly("averages", &Comm::averages)
      .def_property_readonly("spins", &Comm::spins)
      .def(
          "allocate",
          [](Comm& comm, int64_t bytes, const std::string& device) {
            return comm.allocate(bytes, c10::Device(device));
          },
          py::arg("bytes"), py::arg("device") = "cpu", no_gil())
      .def(
          "carry_errors", [](Comm& comm, const at::Tensor& memory) { return HeldErrors{comm.carry_errors(memory)}; },
          py::arg("memory"), no_gil())
      .def("set_board", &Comm::set_board, py::arg("board").none())
      .def("set_returning", &Comm::set_returning, py::arg("process_group"), no_gil())
      .def("give_up", &Comm::give_up, py::arg("why"), no_gil())
      .def("all_reduce", &all_reduce, py::arg("flat"), py::arg("mean"), no_gil())
      .def("has_summed", &Comm::has_summed, py::arg("values"))
      .def("start_gather", &start_gather, py::arg("flat"), py::arg("ranges"), py::keep_alive<0, 1>(), no_gil());
  py::class_<HeldErrors>(m, "CarriedErrors");
  py::class_<HeldRanges>(m, "RankRanges")
      .def(py::init([](const PlainRanges& ranges) {
             return HeldRanges{std::make_shared<const RankRanges>(rank_ranges(ranges))};
           }),
           py::arg("ranges"));
  m.def("piece_of", &piece_of, py::arg("memory"), py::arg("offset"), py::arg("sizes"), py::arg("strides"),
        py::arg("dtype"));
  m.def("torch_comm", &torch_comm, py::arg("process_group"), py::arg("backend"),
        py::arg("ranks") = std::vector<int64_t>(), py::arg("in_tree") = false, no_gil());
  m.def("wire_comm", &wire_comm, py::arg("process_group"), py::arg("returning"), py::arg("dtype"),
        py::arg("ranks") = std::vector<int64_t>(), no_gil());
  m.def("shm_comm", &shm_comm, py::arg("process_group"), py::arg("hosts"), py::arg("group"), py::arg("leaders").none(),
        py::arg("timeout_s"), py::arg("ranks") = std::vector<int64_t>(), py::arg("in_tree") = false, no_gil());
  m.def("nccl_library", &nccl_library, py::arg("fallback"), no_gil());
  m.def("nccl_comm", &nccl_comm, py::arg("process_group"), py::arg("device"), py::arg("timeout_s"), py::arg("fallback"),
        py::arg("ranks") = std::vector<int64_t>(), py::arg("in_tree") = false, no_gil());
  m.def("nccl_memory_bytes", &nccl_memory_bytes);
  py::class_<StepTimes>(m, "Times")
      .def_readonly("forward_start", &StepTimes::forward_start)
      .def_readonly("backward_start", &StepTimes::backward_start)
      .def_readonly("backward_end", &StepTimes::backward_end)
      .def_readonly("comm_start", &StepTimes::comm_start)
      .def_readonly("comm_end", &StepTimes::comm_end)
      .def_readonly("buckets_reduced", &StepTimes::buckets_reduced)
      .def_readonly("exposed", &StepTimes::exposed);
  py::class_<Progress::Snapshot>(m, "ProgressSnapshot")
      .def_readonly("step", &Progress::Snapshot::step)
      .def_readonly("position", &Progress::Snapshot::position)
      .def_readonly("awaited", &Progress::Snapshot::awaited)
      .def_readonly("needed", &Progress::Snapshot::needed)
      .def_readonly("seconds", &Progress::Snapshot::seconds)
      .def_readonly("wait_s", &Progress::Snapshot::wait_s)
      .def_readonly("num_waits", &Progress::Snapshot::num_waits);
  py::class_<Progress::DeviceLag>(m, "DeviceLag")
      .def_readonly("step", &Progress::DeviceLag::step)
      .def_readonly("seconds", &Progress::DeviceLag::seconds);
  // These calls keep the GIL: the mutex is held for moments, and a process that forks with the GIL never copies it
  // locked.
  py::class_<Progress, std::shared_ptr<Progress>>(m, "Progress")
      .def("snapshot", &Progress::snapshot)
      .def("set_report", &Progress::set_report, py::arg("step"), py::arg("report"))
      .def("device_lag", &Progress::device_lag)
      .def("give_up", &Progress::give_up, py::arg("why"))
      .def("why_given_up", &Progress::why_given_up)
      .def(
          "begin_wait",
          [](Progress& progress, const std::string& what) {
            progress.begin_wait(std::make_shared<const std::string>(what), Progress::kForward);
          },
          py::arg("what"))
      .def("end_wait", &Progress::end_wait);
  py::class_<ExpectedBucket>(m, "ExpectedBucket")
      .def_readonly("ready", &ExpectedBucket::ready)
      .def_readonly("start", &ExpectedBucket::start)
      .def_readonly("end", &ExpectedBucket::end);
  py::class_<PlanReport>(m, "PlanReport")
      .def_readonly("expected", &PlanReport::expected)
      .def_readonly("why_not", &PlanReport::why_not)
      .def_property_readonly("costs",
                             [](const PlanReport& report) {
                               std::vector<std::pair<int64_t, double>> points;
                               for (const auto& point : report.costs.points) {
                                 points.emplace_back(point.bytes, point.seconds);
                               }
                               return points;
                             })
      .def_readonly("exposed", &PlanReport::exposed_s);
  py::class_<PendingReduce>(m, "PendingReduce")
      .def("wait", &PendingReduce::wait, no_gil())
      .def("is_done", &PendingReduce::is_done, no_gil());
  m.def("scale_by", &scale_by, py::arg("values"), py::arg("factor"), no_gil());
  register_reducer(m);
}

}  // namespace drivetrain::ddp
