// Declares a batch: the parameters of one rule, device and computing type, which one launch updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <type_traits>
#include <vector>

#include "base/device_table.h"
#include "optim/adafactor.h"
#include "optim/cuda_step.h"
#include "optim/muon.h"
#include "optim/rule_table.h"
#include "optim/step.h"
#include "optim/step_plan.h"

namespace drivetrain::optim {

// A contiguous copy of a tensor with holes or with other strides than its parameter. The step reads and writes the
// copy.
struct Copy {
  at::Tensor original;  // receives the result; undefined if the copy is only read
  at::Tensor copy;
};

// An array that every step fills again, and that knows whether a device has its values. It compares each new value
// with the one of the last step, which it never follows.
template <class T>
class Refilled {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  void clear() { size_ = 0; }
  void push_back(const T& value) {
    if (size_ == values_.size()) {
      values_.push_back(value);
      is_placed_ = false;
    } else if (std::memcmp(&values_[size_], &value, sizeof(T)) != 0) {
      values_[size_] = value;
      is_placed_ = false;
    }
    ++size_;
  }

  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  const T* begin() const { return values_.data(); }
  const T* end() const { return values_.data() + size_; }
  const T& operator[](size_t i) const { return values_[i]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  bool is_placed() const { return is_placed_ && num_placed_ == size_; }
  void set_placed(bool is_placed) {
    is_placed_ = is_placed;
    num_placed_ = size_;
  }

 private:
  std::vector<T> values_;
  size_t size_ = 0, num_placed_ = 0;
  bool is_placed_ = false;
};

// All parameters of one rule, device and computing type: one launch updates them.
struct Batch {
  const RuleInfo* rule;
  at::Device device;
  bool in_double;
  Refilled<ParamJob> params;
  std::deque<Copy> copies;  // a deque keeps references valid
  int64_t total = 0;
  int64_t num_chunks = 0;  // chunks of gradients (formats/summation.h)

  std::vector<uint32_t> written_of = {};  // indices into StepReader::written, in the order of `params`

  // On CUDA: the data that start_cuda() reads, and its addresses on the device.
  Refilled<ParamStart> starts = {};        // in the order of `params`
  Refilled<ParamStart> empty_starts = {};  // parameters without elements, whose steps are only counted
  std::vector<GroupNumbers> numbers = {};
  int64_t numbers_group = -1;  // the group of numbers.back()
  // Separate, because schedulers change only the numbers in every step, and new gradients change no blocks.
  DeviceTable table = {}, numbers_table = {}, blocks_table = {};
  struct Placed {
    ParamJob* params;
    const ParamStart* starts;
    const GroupNumbers* numbers;
    const Factored* factored;
    const ParamJob* momenta;
    ParamJob* steps;
    const StepBlock* blocks;
    ParamJob* others;
  } placed = {};
  StepPlan plan = {};
  int64_t total_of_others = 0;  // elements of plan.others
  Factoring factoring = {};
  at::Tensor factors = {};  // memory of the factors during the step
  MuonPlan muon = {};       // Muon's memory during the step
};

// A step counter. On CUDA it is on its parameter's device, and the step itself increments it. The host then need not
// wait to learn whether the step was skipped. Otherwise it is on the CPU.
struct StepCounter {
  void* value;     // null if the rule has no counter
  bool is_double;  // else float
};

// A scalar of a parameter's state on the CPU, and its value after the step.
struct AdvancedScalar {
  StepCounter scalar;
  double value;
};

// A parameter that the step writes, and its gradient, which it may write. The step increments their autograd versions.
struct Written {
  c10::TensorImpl* param;
  c10::TensorImpl* grad;
  StepCounter counter;  // only a counter on the CPU
};

}  // namespace drivetrain::optim
