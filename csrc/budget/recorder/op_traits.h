// Declares OpTraits: the properties of an operator that the recorder needs, derived from its schema and its name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace drivetrain::budget {

// The dispatch key of the recorder. It lies above autograd, and no other part of torch or drivetrain uses it.
constexpr auto kRecorderKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kBelowRecorder(c10::DispatchKeySet::FULL_AFTER, kRecorderKey);

struct OpTraits {
  explicit OpTraits(const c10::OperatorHandle& op);

  bool is_statistic(int32_t arg) const { return statistics >= 0 && (arg == statistics || arg == statistics + 1); }
  bool changes_arguments() const { return writes_any || separates_versions || statistics >= 0; }

  std::string name;          // "aten::addmm"
  std::vector<bool> writes;  // per argument: whether the operator writes its memory
  bool writes_any = false;
  bool is_composite;      // consists of other operators
  bool is_uninitialized;  // returns memory that other operators fill
  bool returns_garbage;   // is_uninitialized, and the memory has arbitrary contents
  bool only_writes;       // the written values do not depend on the previous ones
  bool has_workspace;     // returns a workspace among its results
  bool is_view;           // returns no memory of its own
  bool is_random;
  uint64_t identity;        // a hash of the name, including the overload
  bool separates_versions;  // returns views with independent version counters
  bool is_batch_norm;       // can be replayed without its running statistics
  int32_t statistics;       // the first of two arguments that it updates without declaring so; -1: none
  bool is_collective;       // belongs to torch.distributed, and may write all of its arguments
  bool is_never_replayed;
  std::atomic<bool> is_removed = false;  // the dispatcher has deregistered it, so its handles are invalid
};

// Returns the traits of an operator. They are computed once and never freed, because tapes refer to them.
const OpTraits& traits_of(const c10::OperatorHandle& op);

bool has_kernel(const c10::OperatorHandle& op, c10::BackendComponent backend);

}  // namespace drivetrain::budget
