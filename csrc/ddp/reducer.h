// Declares the reducer: it reduces gradients over ranks while backward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ddp/reducer_parts.h"

namespace drivetrain::ddp {

// A wrapped module has one reducer. Autograd's hooks put each gradient into the flat buffer as it comes, so that at
// most one exists twice. A full bucket goes to the transport.
//
// The life of a synchronized step, which reducer.cpp shows from top to bottom:
//   1. prepare_for_forward() and prepare_for_backward() surround a forward whose backward will synchronize.
//   2. on_gradient() comes from a hook per parameter. The first one begins the backward.
//   3. Buckets that are full start in plan order, the same on every rank.
//   4. Once the last bucket has started, a callback at the end of backward waits for all and finalizes the step.
//
// A backward synchronizes after a forward that prepared it, as with torch's reducer. So does any other backward through
// outputs that announce() got, if set_sync(true) holds then: `.grad` at its end is reduced. To reduce twice
// does no harm, as the mean of equal means is the mean. Any other backward stays this rank's own, such as one of the
// inner module or of a penalty. Its hooks only move gradients into the buffer.
//
// A static graph's first synchronized step counts how often each parameter's hook fires, and reduces everything at the
// end of backward. Later steps wait for as many.
//
// Invariant: one mutex guards all parts. Hooks run on autograd's threads, without the GIL.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // params: the parameters that require a gradient, in registration order; names: theirs, for messages.
  static std::shared_ptr<Reducer> make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Calls body(ReducerParts&) under the mutex, for settings, for reports and for ranks that have run out of inputs.
  template <class Body>
  auto with_parts(Body&& body) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return std::forward<Body>(body)(parts_);
  }
  // Returns the published progress, which may outlive the reducer, without taking the mutex.
  std::shared_ptr<Progress> progress() const { return parts_.collectives.progress(); }
  // Decides if a backward through announced outputs synchronizes although no forward prepared it.
  void set_sync(bool sync) { sync_ = sync; }

  // Begins a forward whose backward will synchronize.
  void prepare_for_forward();
  // Ends that forward. outputs: its tensors, by which unused parameters are found. Throws if the step before was left
  // incomplete, and names the parameters that got no gradient. Returns the names of frozen parameters that require a
  // gradient now, once each.
  std::vector<std::string> prepare_for_backward(const std::vector<at::Tensor>& outputs);
  // Marks the outputs of any forward that records a graph, as the script gets them. Ranks must announce theirs
  // together.
  void announce(const std::vector<at::Tensor>& outputs);

  // Takes the gradient that has been accumulated into parameter `index`'s `.grad`. came: false if it is none; grad: as
  // autograd computed it, undefined if that is unknown.
  void on_gradient(size_t index, bool came = true, const at::Tensor& grad = {});
  // Reduces everything at the end of a static graph's first synchronized backward.
  void delay_all_reduce();

  // Surround a backward whose loss was multiplied with this rank's weight, such as a number of tokens. The gradients of
  // the next synchronized backward are then the sum over ranks divided by the sum of weights.
  // holds: see WeightedMean::begin().
  void begin_weighted(double weight, const WeightedMean::Holds& holds);
  void end_weighted(bool failed);
  // Reduces at once the gradients that weighted backwards under no_sync() have collected, for an accumulation that ends
  // without a backward that synchronizes. Other ranks may be in such a backward. A rank that has collected nothing has
  // weight 0.
  void reduce_collected();

  void remove_autograd_hooks();

 private:
  class ArrivalHook;
  class Hook;
  class OutputHook;

  Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
          ReducerOptions options);
  void remove_hooks();
  void begin_backward();
  void take_gradient(size_t index, bool came);
  void mark_ready(size_t index);
  void mark_rest_unused();
  void mark_rest_unused_at_end();
  bool start_full_buckets();
  void start_full_buckets_in_backward();
  void finalize();
  void on_output();
  void reduce_announced(int task);
  void reduce_gradients(BackwardKind kind);

  std::recursive_mutex mutex_;  // recursive: a communication hook may ask this reducer something
  ReducerParts parts_;
  std::vector<uintptr_t> hooks_;                                        // by parameter; empty once they are removed
  std::vector<const torch::autograd::FunctionPreHook*> arrival_hooks_;  // likewise
  std::atomic<bool> sync_{true};
};

}  // namespace drivetrain::ddp
