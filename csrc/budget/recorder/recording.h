// Declares Recording, which writes the operations of a running forward pass to a tape.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "budget/recorder/parts.h"
#include "budget/recorder/plan_cursor.h"
#include "budget/recorder/profile.h"
#include "budget/recorder/tape.h"
#include "budget/recorder/value_store.h"

namespace drivetrain::budget {

class Recording {
 public:
  // profile: null for a pass under a plan. notes_checksums: of what replays read, for them to compare.
  Recording(Tape& tape, ValueStore& store, Profile* profile, bool notes_checksums);

  // Runs an operation and records it. `stack` has its arguments, and its results afterwards.
  void record(const c10::OperatorHandle& op, const OpTraits& traits, c10::DispatchKeySet keys,
              torch::jit::Stack* stack);

  // Links a tensor that autograd saves to its value, at once or after the running operation has returned.
  void save(const std::shared_ptr<SavedTensor>& saved, const at::Tensor& tensor);

  // Gives operations that have read this tensor a copy of it, because it is about to be written in place. Applies to
  // tensors that existed before the pass.
  void preserve(const at::Tensor& tensor);

  // Ends the recording.
  void finish();

  int32_t module() const { return module_; }
  void set_module(int32_t module) { module_ = module; }
  // Describes where the pass first left the plan: "operation 12 is aten::mul, the plan has aten::add"; empty: nowhere.
  const std::string& divergence() const { return divergence_; }

 private:
  struct Unresolved {
    std::weak_ptr<SavedTensor> saved;
    at::Tensor tensor;
    std::optional<uint32_t> version;  // the saved version of an argument
  };
  struct KnownStorage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // a weak reference, so that its address is not reused
    int32_t value;                                      // -1: it existed before the pass
  };

  int32_t add_value(const at::Tensor& tensor, int32_t op, bool can_recompute);
  int32_t value_of(const at::Tensor& tensor, bool is_new);
  int32_t value_of_argument(const at::Tensor& tensor);
  void add_unseen_write(int32_t value, const at::Tensor& tensor);
  void protect(int32_t value);
  void separate_versions(int32_t value);
  void mark_unrecorded(int32_t value, const at::Tensor& tensor);
  void hold_for_profile(int32_t value, const at::Tensor& tensor);

  bool is_as_planned(const RecordedOp& op) const;
  bool needs_anchor(int32_t value) const;
  bool has_room_for(const Value& value) const;
  void begin_op_in_parts(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  int64_t part_bytes() const;
  void record_arguments(RecordedOp& op, const torch::jit::Stack& stack, bool may_be_replayed);
  void record_ambient_state(RecordedOp& op, const torch::jit::Stack& stack);
  c10::IValue record_argument(RecordedOp& op, int32_t arg, const c10::IValue& argument, bool is_written,
                              bool may_be_replayed);
  void record_tensor(RecordedOp& op, int32_t arg, int32_t element, const at::Tensor& tensor, bool is_written,
                     bool may_be_replayed);
  void note_reads_in_profile(const RecordedOp& op);
  void note_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool is_view);
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void forget_running_op();
  void record_results(RecordedOp op, bool can_recompute, torch::jit::Stack* stack);
  std::vector<at::Tensor> add_results(RecordedOp& op, bool can_recompute, const torch::jit::Stack& stack);
  void mark_replayable(const RecordedOp& op, bool can_recompute);
  void apply_plan(int32_t op);
  void resolve_saved();
  void resolve(SavedTensor& saved, const at::Tensor& tensor);

  Tape& tape_;
  ValueStore& store_;
  Profile* const profile_;
  const bool notes_checksums_;
  ska::flat_hash_map<const c10::StorageImpl*, KnownStorage> known_;
  PlanCursor cursor_;
  std::string divergence_;
  int32_t num_as_planned_ = 0;   // the last operations in a row
  int64_t unplanned_bytes_ = 0;  // recomputed outside of the plan, beyond what the plan has stored since
  std::optional<Parts> detour_;  // once these are many
  int32_t next_number_ = 0;      // see Value::number
  int32_t module_ = -1;
  std::shared_ptr<const recompute::Autocast> autocast_;
  std::pair<c10::DispatchKeySet, c10::DispatchKeySet> autocast_keys_;  // the keys for which autocast_ was read

  // The state of the operation that is running.
  bool is_running_ = false;
  int32_t saving_op_ = 0;
  std::vector<at::Tensor> written_;  // the arguments that it writes, in the order of their references
  std::vector<std::pair<int32_t, at::Tensor>> anchors_;  // values to hold if it makes a value; see needs_anchor()
  std::vector<Unresolved> unresolved_;
  uint64_t arguments_ = 0;  // see RecordedOp::arguments
  Profile::Memory memory_;  // of the values that it reads, for the profile
};

}  // namespace drivetrain::budget
