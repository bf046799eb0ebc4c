// The dispatcher's fallback that hands operations to the tape, and autograd's hooks; see record.h.
#include "budget/recorder/record.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/hash.h"
#include "budget/budget.h"
#include "budget/recorder/call.h"
#include "checkpoint/hooks.h"

namespace py = pybind11;

namespace drivetrain::budget {
namespace {

constexpr const char* kTape = "drivetrain.Tape";
constexpr const char* kSaved = "drivetrain.TapeSaved";

// Passes whose replays compare what they read: it takes another look at every byte. Whoever writes unseen mostly does
// in each step; of micro-batches, each comes to its turn.
constexpr int64_t kFirstChecked = 8;
constexpr int64_t kCheckedEvery = 31;

template <size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What is zero or one is filled by others, too: gathered into, added to.
constexpr std::array<std::string_view, 17> kUninitialised{
    "aten::empty",     "aten::empty_like", "aten::empty_strided",     "aten::empty_permuted", "aten::new_empty",
    "aten::resize",    "aten::zeros",      "aten::new_empty_strided", "aten::zeros_like",     "aten::new_zeros",
    "aten::full",      "aten::full_like",  "aten::empty_quantized",   "aten::new_full",       "aten::ones",
    "aten::ones_like", "aten::new_ones"};
constexpr std::array<std::string_view, 10> kOnlyWrite{
    "aten::fill_",   "aten::zero_",        "aten::copy_",       "aten::bernoulli_", "aten::uniform_",
    "aten::normal_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_",    "aten::geometric_"};
constexpr std::array<std::string_view, 3> kTears{"aten::unsafe_chunk", "aten::unsafe_split",
                                                 "aten::unsafe_split_with_sizes"};
// They update running statistics without saying so: of these, which come third and fourth, nothing else depends on them
// in training,
constexpr std::array<std::string_view, 3> kBatchNorm{"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                                     "aten::miopen_batch_norm"};
// and these are not called again.
constexpr std::array<std::string_view, 3> kStatistics{
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts", "aten::batch_norm_update_stats"};

// Of all operations that were called so far. An operation that is removed (a torch.library.Library goes, or a
// notebook's cell runs again) leaves its handle to the next one that comes.
class KnownTraits : public c10::OpRegistrationListener {
 public:
  const OpTraits& of(const c10::OperatorHandle& op) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(op);
    if (found != known_.end()) return *found->second;
    return *known_.emplace(op, new OpTraits(op)).first->second;  // never freed: tapes refer to them
  }

  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(op);
    if (found == known_.end()) return;
    found->second->is_removed = true;
    known_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorHandle, OpTraits*> known_;
};

KnownTraits& listening() {
  auto traits = std::make_unique<KnownTraits>();
  KnownTraits& made = *traits;
  // Never given back: the dispatcher has it to the end.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::move(traits)));
  return made;
}

const OpTraits& traits_of(const c10::OperatorHandle& op) {
  static KnownTraits& known = listening();
  return known.of(op);
}

uint64_t hash_of(const c10::OperatorName& name) {
  const std::string whole = c10::toString(name);
  return hash_bytes(whole.data(), static_cast<int64_t>(whole.size()));
}

bool has_kernel(const c10::OperatorHandle& op, c10::BackendComponent backend) {
  return op.hasKernelForDispatchKey(c10::toRuntimePerBackendFunctionalityKey(c10::DispatchKey::Dense, backend));
}

// Whether what its arguments are goes on to other operations, which are the ones to be recorded: made of those, or
// somebody between here and autograd changes the arguments.
bool passes(const c10::OperatorHandle& op, const OpTraits& traits, c10::DispatchKeySet keys) {
  if (keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  const c10::DispatchKeySet autocast = keys & c10::autocast_dispatch_keyset;
  if (!autocast.empty() && op.hasKernelForDispatchKey(autocast.highestPriorityTypeId())) return true;
  if (!traits.is_composite) return false;
  const c10::BackendComponent backend = keys.highestBackendKey();
  return backend == c10::BackendComponent::InvalidBit || !has_kernel(op, backend);
}

// The pass that this thread records.
struct Recorded {
  std::shared_ptr<Tape> tape;
  PyObject* pack = nullptr;  // the hook, which the thread's stack of them owns

  ~Recorded() {
    if (tape) tape->close();  // the thread ends inside of the pass
  }
};

Recorded& recorded_here() {
  static thread_local Recorded recorded;
  return recorded;
}

// Takes the pass's hooks from among this thread's, wherever they are: what is above them is not ours.
void remove_hooks(PyObject* pack) {
  const PyObject* top = at::SavedTensorDefaultHooks::get_tls_state().stack.empty()
                            ? nullptr
                            : at::SavedTensorDefaultHooks::get_tls_state().stack.top().first.ptr(getPyInterpreter());
  if (top == pack) {
    at::SavedTensorDefaultHooks::pop_hooks();
    return;
  }
  at::impl::SavedTensorDefaultHooksTLS state = at::SavedTensorDefaultHooks::get_tls_state();
  std::vector<std::pair<c10::SafePyObject, c10::SafePyObject>> others;
  for (; !state.stack.empty(); state.stack.pop()) {
    if (state.stack.top().first.ptr(getPyInterpreter()) != pack) others.push_back(state.stack.top());
  }
  for (; !others.empty(); others.pop_back()) state.stack.push(others.back());
  at::SavedTensorDefaultHooks::set_tls_state(state);
}

// From now on this thread's operations are not recorded; gives the tape of those that were.
std::shared_ptr<Tape> end_here() {
  c10::impl::tls_set_dispatch_key_included(kRecorderKey, false);
  Tape::current() = nullptr;
  Recorded& recorded = recorded_here();
  if (!recorded.tape) return nullptr;
  remove_hooks(std::exchange(recorded.pack, nullptr));
  recorded.tape->close();
  return std::exchange(recorded.tape, nullptr);
}

void on_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Tape* tape = Tape::current();
  if (tape == nullptr || tape->is_closed()) {
    // Nobody records (any more): somebody has put this thread's keys back as they were in a pass, or has ended it from
    // outside.
    const std::shared_ptr<Tape> ended = end_here();
    if (ended) ended->end();
  } else {
    const OpTraits& traits = traits_of(op);
    if (!passes(op, traits, keys)) {
      tape->record(op, traits, keys, stack);
      return;
    }
  }
  op.redispatchBoxed(keys & kBelowRecorder, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_call>());
}

bool has_any_kernel(const c10::OperatorHandle& op) {
  for (auto at = static_cast<uint8_t>(c10::BackendComponent::InvalidBit) + 1;
       at <= static_cast<uint8_t>(c10::BackendComponent::EndOfBackendKeys); ++at) {
    if (has_kernel(op, static_cast<c10::BackendComponent>(at))) return true;
  }
  return false;
}

// From now on torch's own views, which are known by their memory, and what passes on every backend do not come here:
// looking at a call costs as much as a small operation.
void let_pass() {
  static torch::Library library(torch::Library::IMPL, "aten", kRecorderKey, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const std::optional<c10::OperatorHandle> op = dispatcher.findSchema(name);
    if (!op) continue;
    const OpTraits traits(*op);
    const bool never_comes = traits.is_composite ? !has_any_kernel(*op) : traits.is_view;
    if (never_comes) library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFallthrough());
  }
}

// Backward begins, and a frugal profile ends. Not an Exception: a step's own handlers are not for it.
PyObject* profile_ended() {
  static PyObject* type = PyErr_NewException("drivetrain._C.ActivationProfileEnded", PyExc_BaseException, nullptr);
  return type;
}

Purpose purpose_named(std::string_view name) {
  if (name == "plan") return Purpose::kPlan;
  if (name == "profile") return Purpose::kProfile;
  if (name == "frugal profile") return Purpose::kFrugalProfile;
  if (name == "timings") return Purpose::kTimings;
  throw UserError(text("purpose is \"", name, "\", expected \"plan\", \"profile\", \"frugal profile\" or \"timings\""));
}

PyObject* pack(PyObject* tape, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  auto saved = checkpoint::value_in<std::shared_ptr<Tape>>(tape, kTape)->save(THPVariable_Unpack(tensor));
  return checkpoint::capsule(std::move(saved), kSaved).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* saved) {
  HANDLE_TH_ERRORS
  const auto of = checkpoint::value_in<std::shared_ptr<Tape::Saved>>(saved, kSaved);
  if (of->tape->is_frugal()) {
    PyErr_SetString(profile_ended(), "drivetrain.activation_budget has seen what it needs of this step");
    return nullptr;
  }
  const c10::impl::ExcludeDispatchKeyGuard no_recording(kRecorderKey);
  return THPVariable_Wrap(of->tape->take(*of));
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method{"pack", &pack, METH_O, nullptr};
PyMethodDef unpack_method{"unpack", &unpack, METH_O, nullptr};

}  // namespace

OpTraits::OpTraits(const c10::OperatorHandle& op)
    : name(op.operator_name().name),
      is_composite(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)),
      is_uninitialised(is_one_of(name, kUninitialised)),
      is_garbage(is_uninitialised && name.find("empty") != std::string::npos),
      only_writes(is_one_of(name, kOnlyWrite)),
      has_workspace(name == "aten::mkldnn_rnn_layer" || is_one_of(name, kBatchNorm)),
      is_random(op.hasTag(at::Tag::nondeterministic_seeded)),
      identity(hash_of(op.operator_name())),
      tears(is_one_of(name, kTears)),
      is_batch_norm(is_one_of(name, kBatchNorm)),
      statistics(is_batch_norm || is_one_of(name, kStatistics) ? (name == "aten::batch_norm_update_stats" ? 1 : 3)
                                                               : -1),
      is_collective(name.starts_with("c10d::") || name.starts_with("_c10d_functional::")),
      is_never_replayed(is_collective || (statistics >= 0 && !is_batch_norm)) {
  for (const c10::Argument& argument : op.schema().arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes.push_back(is_written);
    writes_any = writes_any || is_written;
    if (is_written && argument.kwarg_only()) only_writes = true;  // out=
  }
  const auto& returns = op.schema().returns();
  is_view = !writes_any && !tears && !returns.empty() &&
            std::all_of(returns.begin(), returns.end(), [](const c10::Argument& returned) {
              return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
            });
}

Recorder::Recorder(Purpose purpose)
    : purpose_(purpose), ledger_(std::make_shared<Ledger>()), forms_(std::make_shared<Forms>()) {
  static std::once_flag once;
  std::call_once(once, &let_pass);
}

Recorder::~Recorder() { stop(); }

void Recorder::set_plans(std::vector<TapePlan> plans) {
  plans_.clear();
  num_passes_ = 0;
  for (TapePlan& plan : plans) {
    plan.seconds.assign(plan.ops.size(), 0);
    plans_.push_back(std::make_shared<TapePlan>(std::move(plan)));
  }
}

std::vector<std::vector<double>> Recorder::seconds_by_op() const {
  std::vector<std::vector<double>> seconds;
  for (const auto& plan : plans_) {
    seconds.push_back(plan->seconds);
    for (double& one : seconds.back()) one /= static_cast<double>(std::max<int64_t>(1, plan->num_passes));
  }
  return seconds;
}

void Recorder::reset() {
  ledger_->reset();
  for (const auto& plan : plans_) {
    plan->seconds.assign(plan->ops.size(), 0);
    plan->num_passes = 0;
  }
}

bool Recorder::is_mine() const { return tape_ && Tape::current() == tape_.get(); }

Recorder::Entry Recorder::enter() {
  if (is_mine()) return {Place::kInside, nullptr};
  if (tape_ && !tape_->is_closed()) return {Place::kRefused, nullptr};
  if (Tape::current() != nullptr) {
    if (!Tape::current()->is_closed()) return {Place::kInside, nullptr};
    end_here();
  }
  for (std::vector<std::weak_ptr<Tape>>* tapes : {&waiting_, &failed_}) {
    std::erase_if(*tapes, [](const std::weak_ptr<Tape>& tape) {
      const auto alive = tape.lock();
      return !alive || !alive->is_in_use();
    });
  }
  std::shared_ptr<TapePlan> plan;
  if (!plans_.empty()) plan = plans_[std::min(waiting_.size(), plans_.size() - 1)];
  const bool is_checked =
      purpose_ == Purpose::kPlan && (num_passes_ < kFirstChecked || num_passes_ % kCheckedEvery == 0);
  ++num_passes_;
  const auto tape = std::make_shared<Tape>(ledger_, plan, forms_, purpose_, is_checked, model_);
  checkpoint::push_hooks(&pack_method, checkpoint::capsule(tape, kTape),
                         &unpack_method);  // may throw: some transforms allow none
  ledger_->open(tape);
  tape_ = tape;
  recorded_here().tape = tape_;
  recorded_here().pack = at::SavedTensorDefaultHooks::get_tls_state().stack.top().first.ptr(getPyInterpreter());
  Tape::current() = tape_.get();
  c10::impl::tls_set_dispatch_key_included(kRecorderKey, true);
  if (plan) ++plan->num_passes;
  return {Place::kOutermost, tape_};
}

void Recorder::leave(const Entry& entry, bool is_whole) {
  if (entry.place != Place::kOutermost || recorded_here().tape != entry.tape) return;  // or stop() has ended it
  end_here();
  end(entry.tape, is_whole);
}

void Recorder::end(const std::shared_ptr<Tape>& tape, bool is_whole) {
  if (tape_ == tape) tape_.reset();
  if (!is_whole) {
    failed_.push_back(tape);
    try {
      tape->end();
    } catch (...) {  // the exception that has ended the pass is the one to tell
      tape->abandon();
    }
    return;
  }
  tape->end();
  divergence_ = tape->divergence();
  waiting_.push_back(tape);
  if (purpose_ == Purpose::kPlan) return;
  profiled_.push_back(tape);
  if (purpose_ != Purpose::kTimings) tape->rehearse();
}

void Recorder::stop() {
  if (!tape_) return;
  if (is_mine()) {
    end_here();
    end(std::exchange(tape_, nullptr), false);
  } else {
    tape_->close();
    tape_.reset();
  }
}

void Recorder::abandon() {
  profiled_.clear();
  for (const std::vector<std::weak_ptr<Tape>>* tapes : {&waiting_, &failed_}) {
    for (const std::weak_ptr<Tape>& waiting : *tapes) {
      if (const auto tape = waiting.lock()) tape->abandon();
    }
  }
}

int32_t Recorder::module() const { return is_mine() ? tape_->module() : -1; }

void Recorder::set_module(int32_t module) {
  if (is_mine()) tape_->set_module(module);
}

std::vector<std::shared_ptr<Tape>> Recorder::take_tapes() { return std::exchange(profiled_, {}); }

std::string Recorder::divergence() const { return divergence_; }

void register_recorder(py::module_& m) {
  m.attr("ActivationProfileEnded") = py::handle(profile_ended());
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "ActivationRecorder")
      .def(py::init([](std::string_view purpose) { return std::make_shared<Recorder>(purpose_named(purpose)); }),
           py::arg("purpose") = "plan")
      .def(
          "set_plans",
          [](Recorder& recorder,
             const std::vector<std::vector<
                 std::tuple<std::string, std::vector<int8_t>, bool, std::optional<uint64_t>, std::vector<bool>,
                            std::vector<std::vector<PlannedWrite>>, std::string>>>& plans) {
            std::vector<TapePlan> made;
            for (const auto& plan : plans) {
              std::vector<PlannedOp>& ops = made.emplace_back().ops;
              for (const auto& [name, forms, is_replayed, unhooked_arguments, unhooked, prefetches, module] : plan) {
                ops.push_back({name, forms, is_replayed, unhooked_arguments, unhooked, prefetches, module});
                ops.back().unhooked.resize(forms.size());
              }
            }
            recorder.set_plans(std::move(made));
          },
          py::arg("plans"))
      .def(
          "set_forms",
          [](Recorder& recorder, std::vector<int8_t> tried, std::shared_ptr<saved_tensors::HostPool> pool,
             int64_t budget_bytes) { recorder.forms() = {std::move(tried), std::move(pool), budget_bytes}; },
          py::arg("tried"), py::arg("pool"), py::arg("budget_bytes"))
      .def("abandon", &Recorder::abandon)
      .def("stop", &Recorder::stop)
      .def(
          "set_model",
          [](Recorder& recorder, const py::object& model) {
            recorder.set_model(
                std::make_shared<const c10::SafePyObject>(py::weakref(model).release().ptr(), getPyInterpreter()));
          },
          py::arg("model"))
      .def("take_tapes",
           [](Recorder& recorder) {
             py::list tapes;
             for (const auto& tape : recorder.take_tapes()) {
               py::list values, ops, uses, saves, arguments;
               for (const auto& value : tape->value_traces()) {
                 py::list forms;
                 for (const auto& form : value.forms) forms.append(py::make_tuple(form.form, form.bytes, form.seconds));
                 values.append(py::make_tuple(value.bytes, value.can_keep, value.can_forget, value.replaces, forms));
               }
               for (const auto& op : tape->op_traces()) {
                 ops.append(py::make_tuple(op.name, op.module, op.seconds, op.reads, op.writes));
                 arguments.append(op.arguments);
               }
               for (const auto& use : tape->uses()) uses.append(py::make_tuple(use.value, use.is_release, use.order));
               for (const auto& save : tape->saves()) saves.append(py::make_tuple(save.op, save.value));
               py::dict made;
               made["saves"] = saves;
               made["arguments"] = arguments;
               made["values"] = values;
               made["ops"] = ops;
               made["uses"] = uses;
               made["begin"] = tape->begin();
               tapes.append(made);
             }
             return tapes;
           })
      .def("reset", &Recorder::reset)
      .def("seconds_by_op", &Recorder::seconds_by_op)
      .def_property_readonly("live_bytes", [](Recorder& recorder) { return recorder.ledger().live_bytes(); })
      .def_property_readonly("peak_bytes", [](Recorder& recorder) { return recorder.ledger().peak_bytes(); })
      .def_property_readonly("num_replayed", [](Recorder& recorder) { return recorder.ledger().num_replayed(); })
      .def_property_readonly("replay_seconds", [](Recorder& recorder) { return recorder.ledger().replay_seconds(); })
      .def_property_readonly("divergence", &Recorder::divergence);
  register_calls(m);
  m.def("activation_recorder_key", [] { return std::string(c10::toString(kRecorderKey)); });
}

}  // namespace drivetrain::budget
