// Reads one optimizer step from Python objects and checks all of it before anything changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "grad/deferral.h"
#include "optim/batch.h"
#include "optim/footprint.h"
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
  uint32_t owner;  // index into StepReader::written, or behind it into the parameters that are left out
  bool is_grad;

  bool operator==(const WrittenMemory&) const = default;
};

// A parameter's dtype in the last step.
struct Stepped {
  const void* param = nullptr;  // its PyObject
  at::ScalarType dtype = at::kFloat;
};

// Makes two passes over the parameters. The first reads plain tensors on all threads, by code that only looks at memory
// (read_fast.cpp). The second repeats the others on one thread, with every check and its error message
// (read_checked.cpp). Each optimizer has a reader. It keeps memory and footprints between steps, which need not be
// valid, and results that it compares with those of the next step. The GIL must be held.
class StepReader {
 public:
  // Begins a step. `fresh` lists parameters whose state was created for this step. `writes_grads` tells that the step
  // writes gradients or reads them twice. `last_look` numbers the last access of other code to `state`. It is -1 if
  // that is unknown, or if other code has a reference to `state` now.
  void begin(const pybind11::dict& state, const pybind11::list& fresh, bool writes_grads, int64_t last_look);

  // Adds an element of param_groups; `index` is its position there.
  void add_group(pybind11::handle group, size_t index, const RuleInfo& rule, pybind11::handle hypers,
                 const Precision& precision);

  // Leaves these parameters out of all steps: another step of the caller steps them, at another time than this one.
  // The caller keeps the objects alive.
  void leave_out(const std::vector<pybind11::object>& params);

  // Reads all groups. Throws an error that names the parameter, before anything has changed. `refused` then has it, and
  // every other parameter with an error.
  void read();

  pybind11::list refused;  // (parameter, message of its error)
  pybind11::list
      missing;  // (parameter, index of its group, label): has a gradient, but states are missing or need conversion
  bool has_wrappers = false;  // a parameter with a gradient is a wrapper (a DTensor), so nothing was done
  bool has_deferred = false;  // a gradient waits for factors (grad/deferral.h)
  std::vector<Batch> batches;
  std::vector<RuleArgs> rules;
  std::vector<Written> written;
  std::vector<AdvancedScalar> advanced_scalars;

  // Returns owners of every tensor that was read, for a step during which other threads may run Python.
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> owners() const;

  bool busy = false;  // another thread's step is running

  // Returns a reader that leaves out the same parameters.
  StepReader of_another_thread() const;

 private:
  struct Group {
    pybind11::handle dict;
    size_t index;
    const RuleInfo* rule;
    pybind11::handle hypers;
    Precision precision;
    bool counts_steps;  // required by the rule or its rounding
    GroupNumbers numbers;
  };

  // One parameter in Python. Borrowed: the groups and the state keep the objects alive.
  struct Entry {
    PyObject* param;
    PyObject* state;  // the parameter's entry in the optimizer's state, or null
    uint32_t group;
    uint32_t index;  // index in its group

    bool is_at(const Entry& other) const {
      return param == other.param && group == other.group && index == other.index;
    }
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

  // The parameter that the states in a Reading belong to, as they were checked. While only the optimizer's state refers
  // to its entries, and no other code accesses that, they stay unchanged. A step then need not read them again.
  struct Known {
    static constexpr int64_t kMaxDims = 4;
    PyObject* param = nullptr;  // null if the states must be read
    uint32_t group = 0;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    bool shares_storage = false;  // a state shares its memory with other tensors, which could free it
    int64_t num_dims = 0;
    int64_t sizes[kMaxDims] = {};

    Known() = default;
    Known(const Entry& entry, const c10::TensorImpl& param, bool shares_storage);
    bool is(const Entry& entry, const c10::TensorImpl& param) const;
  };

  // The memory of states in a storage that other tensors share.
  struct SharedStorage {
    const c10::StorageImpl* storage;
    const void* data;
    size_t num_bytes;

    bool operator==(const SharedStorage&) const = default;
  };

  enum class Kind : uint8_t {
    kNoGradient,
    kPlain,  // contiguous tensors of one shape and device, with states; `job` is valid
    kOther,  // the checked pass must read it
  };
  struct Reading {
    Kind kind = Kind::kOther;
    bool in_double = false;
    bool is_deferred = false;           // the gradient waits for factors
    bool is_as_before = false;          // the addresses are those of the step before, and the step is the next one
    at::ScalarType dtype = at::kFloat;  // the parameter's dtype, except for kNoGradient
    at::Device device = at::kCPU;
    ParamJob job = {};
    double steps_done = 0;     // as known to the host
    StepCounter counter = {};  // on the parameter's device if that is CUDA, as the scalars are
    StepCounter scalars[kMaxScalars] = {};
    c10::TensorImpl* param = nullptr;
    c10::TensorImpl* grad = nullptr;
    const void* version = nullptr;
    Known known;
  };

  PyObject* find_state(PyObject* param);
  StateValues state_values(const Entry& entry) const;
  bool lacks_state(const Entry& entry, const StateValues& values) const;
  void read_plain(const Entry& entry, Footprint& footprint, Reading& reading) const;
  bool read_states(const Entry& entry, const c10::TensorImpl& param, Footprint& footprint, Reading& reading) const;
  std::optional<Known> known_from_now(const Entry& entry, const StateValues& values) const;
  bool can_trust_states() const;
  bool has_plain_jobs() const;
  void clear_jobs();
  void renew_rules();
  static Hypers hypers_of(const Group& group);
  void remember_shared_storages();
  void read_other(const Entry& entry);
  void add_jobs();
  void add_job(const Entry& entry, const Reading& reading);

  bool was_cast(size_t index) const;
  void refuse(const Entry& entry, const std::string& reason);
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
  std::unordered_set<PyObject*> fresh_;
  std::unordered_set<PyObject*> left_out_;
  bool writes_grads_ = false;
  int64_t last_look_ = -1;
  bool trusts_states_ = false;  // this step need not read the states of parameters that are known
  bool can_keep_jobs_ = false;  // the jobs of the last step are complete and plain
  bool kept_jobs_write_grads_ = false;
  size_t num_entries_ = 0;  // that this step has so far; equal entries of the step before stay in `entries_`
  bool are_entries_as_before_ = false;
  Py_ssize_t state_position_ = 0;
  std::vector<Group> groups_;
  // As of the last step that read all states: the last look, the groups' rules and options, and storages.
  int64_t looks_known_ = -1;
  std::vector<std::pair<const RuleInfo*, Precision>> groups_known_;
  std::vector<SharedStorage> shared_storages_;
  std::vector<Entry> entries_;
  std::vector<Entry> left_entries_;  // of the parameters that are left out
  std::vector<Reading> readings_;
  std::vector<Footprint> footprints_;          // in the order of the entries
  std::vector<Stepped> stepped_;               // in the order of the entries; set only after a complete read
  std::vector<uint32_t> entry_of_;             // index of the entry of each element of `written`
  std::vector<WrittenMemory> memory_;          // of this step
  std::vector<WrittenMemory> known_as_apart_;  // memory of an earlier step, without overlaps
  // A group and its number of steps done, which a rule was made from.
  struct RuleSource {
    uint32_t group;
    double steps_done;
  };
  std::vector<RuleSource> rule_sources_;  // in the order of `rules`
  // The group, step and scalars of rules.back(), and the scalars after the step.
  int64_t rule_group_ = -1;
  double rule_steps_done_ = 0;
  Scalars rule_scalars_, advanced_;
};

}  // namespace drivetrain::optim
