// Reads one optimizer step from Python objects and checks all of it before anything changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim/batch.h"
#include "optim/precision.h"
#include "optim/rule_table.h"

namespace drivetrain::optim {

// Returns whether `state`, with its scales or null, has that dtype (none: any floating one) as a state of the
// parameter. If not, it must be converted. Does not check shape and device.
bool is_state_as(const at::Tensor& param, const at::Tensor& state, const at::Tensor* scales,
                 std::optional<at::ScalarType> dtype);

// The memory of a tensor that the step writes.
struct WrittenMemory {
  const char* begin;
  const char* end;
  uint32_t owner;  // index into StepReader::written
  bool is_grad;

  bool operator==(const WrittenMemory&) const = default;
};

// A parameter of the last step: the addresses of its objects, which are compared and never followed, and its dtype.
struct Stepped {
  const void* param = nullptr;
  const void* state = nullptr;
  at::ScalarType dtype = at::kFloat;
};

// Makes two passes over the parameters. The first reads plain tensors on all threads, by code that only looks at memory
// (read_fast.cpp). The second repeats the others on one thread, with every check and its error message
// (read_checked.cpp). The GIL must be held.
//
// Between steps a reader keeps only memory to write into, whose values it compares and never follows. Within a step
// this holds: either no code but the step's own runs, or the step owns all that it reads and writes. The first pass and
// most steps call no Python code and keep the GIL, so that objects stay as they are; pointers to them suffice. Before
// Python code or another thread may run, own() takes references. This happens for an error's text, for tensors that are
// not plain, and for long steps.
class StepReader {
 public:
  // Begins a step. `fresh` lists parameters whose state was created for this step. `writes_grads` tells that the step
  // writes gradients or reads them twice.
  void begin(const pybind11::dict& state, const pybind11::list& fresh, bool writes_grads);

  // Adds an element of param_groups; `index` is its position there. Python code may run, so that read() looks up the
  // parameters of all groups later.
  void add_group(pybind11::handle group, size_t index, const RuleInfo& rule, pybind11::handle hypers,
                 const Precision& precision);

  // Reads all groups. Throws an error that names the parameter, before anything has changed.
  void read();

  pybind11::list
      missing;  // (parameter, index of its group, label): has a gradient, but states are missing or need conversion
  bool has_wrappers = false;  // a parameter with a gradient is a wrapper (a DTensor), so nothing was done
  std::vector<Batch> batches;
  std::vector<RuleArgs> rules;
  std::vector<Written> written;
  std::vector<AdvancedScalar> advanced_scalars;

  // Takes references to all that was read, for a step during which Python code may run.
  void own() const;

  // Returns the Python object of an element of `written`, borrowed.
  PyObject* param_of(uint32_t written) const { return entries_[entry_of_[written]].param; }

  // Forgets pointers and references. Python code may run.
  void end();

  bool busy = false;  // another thread's step is running

  uint64_t agreed_matrices = 0;  // the hash of matrices that all ranks stepped before (muon.h)

 private:
  struct Group {
    pybind11::object dict;
    size_t index;
    const RuleInfo* rule;
    pybind11::object hypers;
    Precision precision;
    bool counts_steps;  // required by the rule or its rounding
    GroupNumbers numbers;
  };

  // One parameter in Python. Borrowed, see above.
  struct Entry {
    PyObject* param;
    PyObject* state;  // the parameter's entry in the optimizer's state, or null
    uint32_t group;
    uint32_t index;  // index in its group
    uint32_t place;  // index in the optimizer's group, of which this may be a part
  };

  // The entries of a parameter's state that its rule needs. Borrowed.
  struct StateValues {
    bool complete = false;  // no state except `step`, which has its own errors, is absent or None
    PyObject* step = nullptr;
    PyObject* states[kMaxStates] = {};
    PyObject* scales[kMaxStates] = {};  // scales of 8-bit states
    PyObject* scalars[kMaxScalars] = {};
    PyObject* extra = nullptr;  // the parameter's companion
  };

  enum class Kind : uint8_t {
    kNoGradient,
    kPlain,  // contiguous tensors of one shape and device, with states; `job` is valid
    kOther,  // the checked pass must read it
  };
  struct Reading {
    Kind kind = Kind::kOther;
    bool in_double = false;
    at::Device device = at::kCPU;
    ParamJob job = {};
    double steps_done = 0;     // as known to the host
    StepCounter counter = {};  // on the parameter's device if that is CUDA, as the scalars are
    StepCounter scalars[kMaxScalars] = {};
    c10::TensorImpl* param = nullptr;
    c10::TensorImpl* grad = nullptr;
  };

  void find_entries();
  PyObject* find_state(PyObject* param);
  void own(const Entry& entry) const;
  StateValues state_values(const Entry& entry) const;
  bool lacks_state(const Entry& entry, const StateValues& values) const;
  void read_plain(const Entry& entry, Reading& reading) const;
  bool read_states(const Entry& entry, const c10::TensorImpl& param, Reading& reading) const;
  static Hypers hypers_of(const Group& group);
  void read_other(const Entry& entry);
  void add_jobs();
  void add_job(const Entry& entry, const Reading& reading);

  bool was_cast(size_t index) const;
  void check_apart();
  std::string why_together(const WrittenMemory& first, const WrittenMemory& second) const;
  const Entry& entry_of(const WrittenMemory& memory) const;
  void check_memory(const Entry& entry, const at::Tensor& tensor, const char* what) const;
  void check_grad(const Entry& entry, const at::Tensor& param, const at::Tensor& grad) const;
  const at::Tensor& checked_state(const Entry& entry, const at::Tensor& param, PyObject* value, size_t which) const;
  const at::Tensor& checked_number(const Entry& entry, const at::Tensor& param, PyObject* value,
                                   const char* name) const;
  Batch& batch_for(const Entry& entry, at::Device device, bool in_double);
  int32_t rule_index(const Entry& entry, const Reading& reading);
  void advance_scalars(const Entry& entry, const Reading& reading);
  int32_t start_index(Batch& batch, const Entry& entry, const Reading& reading, uint64_t seed);
  double steps_told(const Entry& entry, double steps_done) const;
  std::string label(const Entry& entry) const;

  pybind11::handle state_;  // borrowed during the step
  Py_ssize_t state_position_ = 0;
  std::unordered_map<PyObject*, PyObject*> states_by_param_;  // empty if states are in the parameters' order
  std::unordered_set<PyObject*> fresh_;
  bool writes_grads_ = false;
  std::vector<Group> groups_;
  std::vector<Entry> entries_;
  std::vector<Reading> readings_;
  std::vector<Stepped> stepped_;  // in the order of the entries; set only after a complete read
  mutable bool owns_ = false;
  mutable std::vector<pybind11::object> owned_objects_;
  mutable std::vector<at::Tensor> owned_tensors_;
  mutable std::vector<c10::Storage> owned_storages_;
  std::vector<uint32_t> entry_of_;             // index of the entry of each element of `written`
  std::vector<WrittenMemory> memory_;          // of this step
  std::vector<WrittenMemory> known_as_apart_;  // memory of an earlier step, without overlaps
  // The group, step and scalars of rules.back(), and the scalars after the step.
  int64_t rule_group_ = -1;
  double rule_steps_done_ = 0;
  Scalars rule_scalars_, advanced_;
};

}  // namespace drivetrain::optim
