// Reads one optimizer step out of Python's objects and checks all of it before anything changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/device_table.h"
#include "optim/adafactor.h"
#include "optim/cuda_step.h"
#include "optim/muon.h"
#include "optim/precision.h"
#include "optim/step.h"
#include "optim/step_plan.h"
#include "optim/trust_ratio.h"

namespace drivetrain::optim {

struct RuleInfo {
  const char* name;
  RuleKind kind;
  bool counts_steps;  // the state holds a tensor "step"
  RuleArgs (*make_args)(const Hypers& hypers, double step);
  Adapt adapt;                                                            // null: no norms are asked for
  enum class Needs : uint8_t { kNothing, kMatrix, kRealRowByRow } needs;  // of a parameter's shape and memory
  struct State {
    PyObject* name;  // interned, never freed, as the others
    // With 8 bits it lives under these two instead: torch's class, which would take codes for values, misses it then.
    PyObject* codes_name;
    PyObject* scales_name;
    StateKind kind;
    bool of_all_shapes;  // else see state_sizes()
  };
  std::vector<State> states;
};

// By the name in DT_OPTIM_RULES; throws UserError if there is none.
const RuleInfo& find_rule(const std::string& name);

// Whether `state`, with its scales or null, is a state of that dtype (none: any floating one) for the parameter: if
// not, it must be converted. Shape and device are not looked at.
bool is_state_as(const at::Tensor& param, const at::Tensor& state, const at::Tensor* scales,
                 std::optional<at::ScalarType> dtype);

// A tensor that cannot be walked as it lies (other strides than its parameter's, holes) is stepped in a copy.
struct Copy {
  at::Tensor original;  // gets the result; undefined if the copy is only read
  at::Tensor copy;
};

// What one launch updates: all parameters of one rule, device and computing type.
struct Batch {
  const RuleInfo* rule;
  at::Device device;
  bool in_double;
  std::vector<ParamJob> params;
  std::deque<Copy> copies;  // a deque, so that references into it stay good
  int64_t total = 0;
  int64_t num_chunks = 0;  // of gradients (formats/summation.h)

  std::vector<uint32_t> written_of = {};  // of `params`, in the same order: indices into StepReader::written

  // On CUDA the step is started there: what of, and where there all of it lies.
  std::vector<ParamStart> starts = {};        // of `params`, in the same order
  std::vector<ParamStart> empty_starts = {};  // of parameters without elements, which only count
  std::vector<GroupNumbers> numbers = {};
  int64_t numbers_group = -1;  // whose the last ones are
  DeviceTable table = {},
              numbers_table = {};  // apart: schedulers change numbers in every step, and little else changes
  struct Placed {
    ParamJob* params;
    const ParamStart* starts;
    const GroupNumbers* numbers;
    const Factored* factored;
    const ParamJob* momenta;
    ParamJob* steps;
    const StepItem* items;
  } placed = {};
  StepPlan plan = {};
  Factoring factoring = {};
  at::Tensor factors = {};  // their memory, during the step
  MuonPlan muon = {};       // the same
};

// A counter of steps, to be advanced: beside its parameter on CUDA, by the step itself, so that nobody has to ask the
// device whether the step was made; else on the CPU.
struct StepCounter {
  void* value;     // null: the rule has none
  bool is_double;  // else float
};

// A parameter that the step writes, and its gradient, which it may: autograd must see their versions change.
struct Written {
  c10::TensorImpl* param;
  c10::TensorImpl* grad;
  StepCounter counter;  // on the CPU
};

// Where in memory one parameter's objects lay at the last step. With thousands of small parameters a step is bound by
// the cache misses of walking them, so their lines are asked for some parameters ahead. Only ever prefetched: an
// address that is no longer true costs nothing.
struct Footprint {
  static constexpr int kMaxTensors = 4 + 2 * kMaxStates;  // parameter and its extra, gradient, step, states, scales
  const void* dict_keys = nullptr;                        // of the parameter's state
  const void* step_value = nullptr;
  int num_objects = 0, num_tensors = 0;
  const void* objects[2 + 2 * kMaxStates] = {};  // PyObject of step, extra, states and scales
  const void* tensors[kMaxTensors] = {};         // c10::TensorImpl
  const void* storages[kMaxTensors] = {};        // c10::StorageImpl

  void prefetch() const;
  void add(const at::Tensor& tensor);
  void add(PyObject* object, const at::Tensor& tensor);
};

// The bytes of a tensor that the step writes.
struct Memory {
  const char* begin;
  const char* end;
  uint32_t written;  // whose: an index into StepReader::written
  bool is_grad;

  bool operator==(const Memory&) const = default;
};

// The dtype that a parameter had in the last step.
struct Stepped {
  const void* param = nullptr;  // its PyObject
  at::ScalarType dtype = at::kFloat;
};

// Two passes over the parameters: plain tensors are read on all threads, by code that only looks at memory; what is
// not plain is looked at again with every check and its error message, on one thread.
// One per optimizer: what it keeps between steps is memory and footprints, which need not be true, and what it has
// found out about objects that it compares with those of the next step. The GIL must be held.
class StepReader {
 public:
  // Forgets the step before. fresh: parameters whose state was initialised for this very step. treats_grads: the step
  // does more with gradients than to read them once.
  void begin(const pybind11::dict& state, const pybind11::list& fresh, bool treats_grads);

  // Lists one element of param_groups; index: its place there.
  void add_group(pybind11::handle group, size_t index, const RuleInfo& rule, pybind11::handle hypers,
                 const Precision& precision);

  // Reads all that was added. Throws what is wrong with it, naming the parameter; nothing has changed then.
  void read();

  pybind11::list missing;     // (parameter, index of its group, what users call it): has a gradient but not all of its
                              // state as it must be
  bool has_wrappers = false;  // a parameter with a gradient is a tensor around others (a DTensor): nothing can be done
  std::vector<Batch> batches;
  std::vector<RuleArgs> rules;
  std::vector<Written> written;

  // Owners of every tensor that was read, for a step during which other threads may run Python.
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> owners() const;

  bool busy = false;  // a step of another thread is under way

 private:
  struct Group {
    pybind11::handle dict;
    size_t index;
    const RuleInfo* rule;
    pybind11::handle hypers;
    Precision precision;
    bool counts_steps;  // its rule or its rounding needs it
    GroupNumbers numbers;
  };

  // One parameter as Python holds it. Borrowed: the groups and the state keep the objects alive.
  struct Entry {
    PyObject* param;
    PyObject* state;  // what the optimizer's state has under the parameter, or null
    uint32_t group;
    uint32_t index;  // within its group
  };

  // The values of a parameter's state that its rule needs. Borrowed.
  struct StateValues {
    bool complete = false;  // no state is absent or None, save `step`, which has errors of its own
    PyObject* step = nullptr;
    PyObject* states[kMaxStates] = {};
    PyObject* scales[kMaxStates] = {};  // of 8-bit states
    PyObject* extra = nullptr;          // of the parameter
  };

  enum class Kind : uint8_t {
    kNoGradient,
    kPlain,  // contiguous tensors of one shape and device, states there: `job` and the rest hold
    kOther,  // to be looked at again
  };
  struct Reading {
    Kind kind = Kind::kOther;
    bool in_double = false;
    at::ScalarType dtype = at::kFloat;  // the parameter's, whatever the kind but kNoGradient
    at::Device device = at::kCPU;
    ParamJob job = {};
    double steps_done = 0;     // as far as the host knows
    StepCounter counter = {};  // on the parameter's device, if that is CUDA
    c10::TensorImpl* param = nullptr;
    c10::TensorImpl* grad = nullptr;
  };

  PyObject* find_state(PyObject* param);
  StateValues state_values(const Entry& entry) const;
  bool lacks_state(const Entry& entry, const StateValues& values) const;
  void read_plain(const Entry& entry, Footprint& footprint, Reading& reading) const;
  void read_other(const Entry& entry);
  void add_job(const Entry& entry, const Reading& reading);

  bool was_cast(size_t index) const;
  void check_apart();
  void check_memory(const Entry& entry, const at::Tensor& tensor, const char* what) const;
  void check_grad(const Entry& entry, const at::Tensor& param, const at::Tensor& grad) const;
  const at::Tensor& checked_state(const Entry& entry, const at::Tensor& param, PyObject* value, size_t which) const;
  const at::Tensor& checked_step(const Entry& entry, const at::Tensor& param, PyObject* value) const;
  Batch& batch_for(const Entry& entry, at::Device device, bool in_double);
  int32_t rule_index(const Entry& entry, double steps_done);
  int32_t start_index(Batch& batch, const Entry& entry, const Reading& reading, uint64_t seed);
  double steps_told(const Entry& entry, double steps_done) const;
  std::string label(const Entry& entry) const;

  pybind11::handle state_;  // borrowed for the step
  std::unordered_set<PyObject*> fresh_;
  bool treats_grads_ = false;
  Py_ssize_t state_position_ = 0;
  std::vector<Group> groups_;
  std::vector<Entry> entries_;
  std::vector<Reading> readings_;
  std::vector<Footprint> footprints_;  // of the entries, in the same order
  std::vector<Stepped> stepped_;    // by the entries, in the same order; only ever of a step that was read to its end
  std::vector<uint32_t> entry_of_;  // of each element of `written`
  std::vector<Memory> memory_;      // of this step
  std::vector<Memory> known_as_apart_;  // of an earlier one, in which no two overlapped
  // What rules.back() was made for.
  int64_t rule_group_ = -1;
  double rule_steps_done_ = 0;
};

}  // namespace drivetrain::optim
