// Declares the reducer: it reduces gradients over ranks while backward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/reducer_state.h"

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
// Hooks run on autograd's threads, without the GIL.
class Reducer : public ReducerState, public std::enable_shared_from_this<Reducer> {
 public:
  // params: the parameters that require a gradient, in registration order; names: theirs, for messages.
  static std::shared_ptr<Reducer> make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, ReducerOptions options);
  ~Reducer();

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
  // Takes the weighted gradients since the last part out of `.grad`, for the next synchronized backward to add them.
  // is_first: of a window; parts of an interrupted one are forgotten.
  void end_part(bool is_first);
  // See WeightedMean::total() and note_found().
  WeightedMean::Total weighted_total() {
    return locked([&] { return weights_.total(); });
  }
  void note_found(const at::Tensor& found, bool by_weighted) {
    locked([&] { weights_.note_found(found, by_weighted); });
  }

  // Tells the other ranks which collective this one starts next, where the reducer does not start it.
  void announce_collective(Purpose purpose, const std::string& what) {
    locked([&] { collectives_.announce(purpose, what); });
  }
  // Returns how two ranks have differed in a collective; "": they have not.
  std::string difference() {
    return locked([&] { return collectives_.difference(); });
  }
  // Forgets a step that was interrupted, after its collectives have ended.
  void reset_state();
  // Throws if a synchronized backward has begun and not ended.
  void check_finalized();
  // Returns true between two backwards of a step, once the collectives in progress have ended: `.grad` of their buckets
  // are means by then.
  bool settle_between_backwards();
  void remove_autograd_hooks();
  // Gives the gradients this dtype, and removes the hooks: gradients then come through on_gradient().
  void set_mixed_precision(at::ScalarType dtype);

  // ---- Uneven inputs. A rank without inputs starts the same collectives in the same order as the others. Its own
  // `.grad` become the others' mean where they are views of the buffer, as in torch.

  // Tells that ranks may run out of inputs in the next step. divisor: divides the sum instead of the number of ranks;
  // 0: the number of ranks.
  void set_joining(int64_t divisor) {
    locked([&] { uneven_ = {.is_joining = true, .divisor = divisor}; });
  }
  // The following are for a rank without inputs, in the order of calls. Takes part in the planning of buckets, where
  // the others' backward begins.
  void shadow_planning();
  // Adds zeros to the reduction of a bucket. as_sum: the others divide by another number than all ranks'.
  std::unique_ptr<PendingReduce> reduce_zeros(size_t bucket, bool as_sum);
  void wait_for_zeros(size_t bucket, PendingReduce& reduce);
  // Takes part in the sum of the maps of used parameters, where there is one, and ends the step.
  void end_shadowed_step();

 private:
  class Hook;
  class PreHook;

  using ReducerState::ReducerState;
  void at_end_of_backward(std::function<void()> body);
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

  std::vector<uintptr_t> hooks_;                                        // by parameter; empty once they are removed
  std::vector<const torch::autograd::FunctionPreHook*> arrival_hooks_;  // likewise
  std::atomic<bool> sync_{true};
};

}  // namespace drivetrain::ddp
