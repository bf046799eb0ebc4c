// How buckets are reduced over ranks: the interface that every transport implements.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace drivetrain::ddp {

// One collective under way.
class PendingReduce {
 public:
  virtual ~PendingReduce() = default;
  // Returns when the result may be used (on CUDA: by work enqueued on the current stream after this). Throws what the
  // transport reports, within its timeout.
  virtual void wait() = 0;
};

class Comm {
 public:
  virtual ~Comm() = default;
  virtual int size() const = 0;
  virtual int rank() const = 0;
  // Whether start() leaves the mean over ranks; else it leaves the sum.
  virtual bool averages() const = 0;
  // Begins an in-place all-reduce of a real tensor, flat or sparse. Every rank must start the same tensors in the same
  // order.
  virtual std::unique_ptr<PendingReduce> start(const at::Tensor& flat) = 0;
  // The same as a sum, whatever averages() says.
  virtual std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat) = 0;
  // Gives every rank rank 0's values, in place; waits for them.
  virtual void broadcast(const at::Tensor& values) = 0;
};

// Over any torch process group, by the name that torch registered it under, for tensors on that kind of device.
std::unique_ptr<Comm> make_torch_comm(const std::string& group_name, c10::DeviceType device);

}  // namespace drivetrain::ddp
