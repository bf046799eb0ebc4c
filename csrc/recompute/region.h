// Declares CheckpointRegion: one checkpointed call, whose saved tensors are freed and recomputed when backward asks for
// them.
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

#include "recompute/ambient.h"
#include "recompute/inputs.h"

namespace drivetrain::recompute {

struct RegionOptions {
  bool preserve_rng_state;
  bool early_stop;       // end a recomputation after the last saved tensor
  bool checks_metadata;  // compare shape, dtype and device, and refuse tensors that were written in place
  bool verify;           // compare hashes of values
};

// The description of a saved tensor whose memory was freed.
struct SavedMetadata {
  explicit SavedMetadata(const at::Tensor& tensor);

  c10::SymDimVector sizes;
  at::ScalarType dtype;
  c10::Device device;
  // A weak reference, so that the address is not reused. If a recomputation saves this storage in the same version, its
  // values are equal.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  int64_t version;
  const std::type_info* grad_fn;  // the type of the node whose output it is; null: none
  std::optional<uint64_t> hash;   // set by verify
  std::string location;           // set by verify: where it was saved

  bool is_wanted = true;  // the graph still refers to it
  at::Tensor value;       // recomputed, but not taken yet
  int64_t value_version = 0;
};

class CheckpointRegion : public std::enable_shared_from_this<CheckpointRegion> {
 public:
  // Calls the function in grad mode. The tensors that autograd saves in it belong to a new region, which lives as long
  // as the graph. The GIL must be held, as for all of this class.
  static pybind11::object run(pybind11::object function, pybind11::tuple args, pybind11::dict kwargs,
                              RegionOptions options);

  CheckpointRegion(pybind11::object function, pybind11::tuple args, pybind11::dict kwargs, RegionOptions options);

 private:
  class Recomputation;
  struct Ticket;  // the graph holds it instead of a saved tensor

  static PyObject* pack(PyObject* region, PyObject* tensor);
  static PyObject* unpack(PyObject* unused, PyObject* ticket);

  pybind11::object save(const at::Tensor& tensor);
  void end_forward();
  at::Tensor value_of(size_t index);
  void recompute();
  std::string name() const;

  // Return error messages, which state the difference and its usual cause; region_errors.cpp has them.
  std::string input_written(const std::string& input) const;
  std::string device_initialized() const;
  std::string outliving_written(size_t index, const at::Tensor& recomputed) const;
  std::string changed(size_t index, const at::Tensor& recomputed) const;
  std::string other_number(size_t num_recomputed) const;
  std::string value_written(size_t index) const;

  const pybind11::object function_;
  std::optional<Inputs> inputs_;  // none after the forward has failed
  const RegionOptions options_;
  const std::optional<RandomStates> random_states_;
  const Autocast autocast_;
  const Switches switches_;
  std::vector<SavedMetadata> saved_;
  bool has_ended_ = false;  // the forward
  std::string failure_;     // the error of the forward; empty: none

  // The backward for which the values were recomputed: autograd's number (-1: none), or torch's GraphExecGroup.
  int graph_task_ = -1;
  pybind11::object group_;
};

// Returns a hash of a tensor's values. Raises NotImplementedError for tensor subclasses.
uint64_t hash_of(const at::Tensor& tensor);

// Returns where Python code runs now, for error messages: "in mlp.act (model.py:88 in forward)".
std::string current_location();

// Names the parameter or buffer that shares the tensor's memory: "parameter 'mlp.up.weight'"; empty: none. `module` is
// a Python weak reference.
std::string owner_in(const c10::SafePyObject& module, const at::Tensor& tensor);

// Returns whether the tensor belongs to the running statistics of a normalization module that is being called.
bool is_running_statistic(const at::Tensor& tensor);

// Throws torch.utils.checkpoint.CheckpointError.
[[noreturn]] void throw_checkpoint_error(const std::string& message);

}  // namespace drivetrain::recompute
