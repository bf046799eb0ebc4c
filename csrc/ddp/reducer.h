// Reduces gradients while backward runs: autograd hooks fill an arena bucket by bucket, full buckets go to the
// transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddp/comm.h"
#include "ddp/plan.h"

namespace drivetrain::ddp {

// One per wrapped module. Every parameter's gradient has a fixed place in one flat allocation per device (the arena)
// for the reducer's life; after a backward, `.grad` is a view of that place. Gradients move into the arena one by one
// as they appear, so that at most one exists twice.
//
// Life of a synchronised step: prepare_for_backward() -> a hook per parameter -> a bucket whose last gradient came is
// reduced (in plan order on every rank) -> after the last bucket has started, a callback at the end of backward waits
// for all. Hooks outside such a step (no_sync) only move the gradient into the arena.
//
// Thread safety: one mutex guards everything; hooks run on autograd's threads, without the GIL.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  struct Options {
    std::vector<int64_t> bucket_caps;  // bytes, in the expected order of buckets; the last repeats
    bool find_unused_parameters = false;
  };

  // params: the parameters that require a gradient, in registration order; names: theirs, for messages.
  static std::shared_ptr<Reducer> make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, const Options& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // After a forward whose backward shall synchronise. outputs: the forward's tensors, from which unused parameters are
  // found. Throws if the step before was left incomplete, naming the parameters that got no gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  // Throws if a synchronised backward has begun and not ended.
  void check_finalized();

  void remove_autograd_hooks();

  struct BucketInfo {
    std::vector<std::string> names;
    int64_t bytes;
    std::string dtype;
  };
  std::vector<BucketInfo> buckets() const;
  int64_t arena_bytes() const { return arena_bytes_; }

  // 1 for each parameter that this rank used since the last synchronised backward.
  at::Tensor local_used_map();

 private:
  Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
          const Options& options);

  enum class Phase {
    kFilling,   // waits for gradients
    kFull,      // has them all, waits for the buckets before it to start
    kReducing,  // with the transport
  };

  struct Parameter {
    at::Tensor tensor;
    std::string name;
    size_t bucket = 0;
    int64_t offset = 0;  // bytes from the bucket's start
    at::Tensor view;     // its place in the arena, strided as the gradient layout contract asks; what .grad becomes
    bool ready = false;  // in this step
    bool without_grad = false;  // this rank has no gradient for it in this step
    at::Tensor untouched;       // copy of a kept .grad of such a parameter, put back if no rank used it
    std::shared_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
  };

  struct Bucket {
    std::vector<size_t> params;
    at::Tensor flat;  // all of it, as the transport gets it: real, one-dimensional, padding included
    size_t missing = 0;
    Phase phase = Phase::kFilling;
    std::unique_ptr<PendingReduce> reduce;
  };

  void build_arena(const Options& options);
  void add_hooks();
  void on_gradient(size_t index);
  at::Tensor view_of(const Parameter& param) const;
  void take_gradient(Parameter& param, bool scaled);
  void fill_view(const Parameter& param, const at::Tensor& values, bool scaled) const;
  void check_gradient(const Parameter& param, const at::Tensor& grad) const;
  void claim(const Parameter& param) const;
  void release_params() const;
  void mark_ready(size_t index);
  void begin_backward();
  void start_full_buckets();
  void finalize_backward();
  void finish_param(Parameter& param, bool used_somewhere);
  void wait_for_buckets();
  void wait_for(PendingReduce& reduce, const std::string& what);
  void end_interrupted_step();
  void check_hooked(const Parameter& param) const;
  void reset();
  std::string describe(const Bucket& bucket) const;
  [[noreturn]] void fail_incomplete() const;

  std::vector<Parameter> params_;
  std::vector<Bucket> buckets_;
  std::shared_ptr<Comm> comm_;
  const bool find_unused_;
  bool scaled_ = false;  // whether gradients are multiplied with scale_ on their way into the arena
  at::Tensor scale_;     // 1 / number of ranks
  int64_t arena_bytes_ = 0;

  mutable std::mutex mutex_;
  // The synchronised step under way.
  enum class Step {
    kIdle,      // none: hooks only collect
    kPrepared,  // a forward asked for synchronisation, no gradient yet
    kRunning,   // gradients arrive
  };
  Step step_ = Step::kIdle;
  size_t next_bucket_ = 0;      // the first that has not started
  std::vector<size_t> unused_;  // found from the outputs, marked when backward begins
  at::Tensor local_used_;       // int32 [num params], on the CPU
  at::Tensor global_used_;      // the same summed over ranks; on the parameters' device while under way
  std::unique_ptr<PendingReduce> used_reduce_;
};

}  // namespace drivetrain::ddp
