// A checkpointed call: what its function saved for backward is forgotten, and recomputed when backward asks for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/SymIntArrayRef.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "checkpoint/ambient.h"
#include "checkpoint/inputs.h"

namespace drivetrain::checkpoint {

struct RegionOptions {
  bool preserve_rng_state;
  bool early_stop;       // a recomputation ends with the last tensor that was saved
  bool checks_metadata;  // shape, dtype and device, and that nobody has written what outlives the function
  bool verify;           // values
};

// What is known of a saved tensor while its values are forgotten.
struct Saved {
  explicit Saved(const at::Tensor& tensor);

  c10::SymDimVector sizes;
  at::ScalarType dtype;
  c10::Device device;
  // Weak: nobody gets that storage's address meanwhile, and whoever has it at recomputation, in the same version, has
  // the same values.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  int64_t version;
  const std::type_info* grad_fn;  // of whose output it is; null: of nobody's
  std::optional<uint64_t> hash;   // both with verify
  std::string place;

  bool is_wanted = true;  // the graph has it still
  at::Tensor value;       // recomputed and not yet used
  int64_t value_version = 0;
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  // Calls the function, in grad mode; whatever it saves belongs to a new region, which lives as long as the graph. The
  // GIL must be held, as for all of this class.
  static pybind11::object run(pybind11::object function, pybind11::tuple args, pybind11::dict kwargs,
                              RegionOptions options);

  Region(pybind11::object function, pybind11::tuple args, pybind11::dict kwargs, RegionOptions options);

 private:
  class Recomputation;
  struct Ticket;  // what the graph has instead of a tensor

  static PyObject* pack(PyObject* region, PyObject* tensor);
  static PyObject* unpack(PyObject* nobody, PyObject* ticket);

  pybind11::object save(const at::Tensor& tensor);
  void end_forward();
  at::Tensor value_of(size_t index);
  void recompute();
  std::string name() const;

  // region_errors.cpp: what each says, and why that usually happens.
  std::string input_written(const std::string& input) const;
  std::string device_initialised() const;
  std::string outliving_written(size_t index, const at::Tensor& recomputed) const;
  std::string changed(size_t index, const at::Tensor& recomputed) const;
  std::string other_number(size_t num_recomputed) const;
  std::string value_written(size_t index) const;

  const pybind11::object function_;
  std::optional<Inputs> inputs_;  // none once the forward has failed
  const RegionOptions options_;
  const std::optional<RandomStates> random_states_;
  const Autocast autocast_;
  std::vector<Saved> saved_;
  bool has_ended_ = false;  // its forward
  std::string failure_;     // of its forward

  // The backward that the values are for: autograd's number for it, -1 outside of any, or torch's GraphExecGroup.
  int graph_task_ = -1;
  pybind11::object group_;
};

// Of a tensor's values.
uint64_t hash_of(const at::Tensor& tensor);

// "in mlp.act (model.py:88 in forward)": where Python code is now, for errors.
std::string place_now();

// "parameter 'mlp.up.weight'": whose memory the tensor is of, in the module that a weak reference of Python's is to;
// empty: nobody's there.
std::string owner_in(const c10::SafePyObject& module, const at::Tensor& tensor);

bool is_running_statistic(const at::Tensor& tensor);

[[noreturn]] void throw_checkpoint_error(const std::string& message);  // torch's CheckpointError

}  // namespace drivetrain::checkpoint
