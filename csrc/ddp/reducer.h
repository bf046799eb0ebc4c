// Reduces gradients while backward runs: autograd hooks fill an arena bucket by bucket, full buckets go to the
// transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/bucket_planner.h"
#include "ddp/late_check.h"
#include "ddp/progress.h"
#include "ddp/transport/comm_hook.h"
#include "ddp/transport/transport.h"
#include "grad/reduced_norm.h"

namespace drivetrain::ddp {

// One per wrapped module. Every parameter's gradient has a fixed place in one flat allocation per device (the arena)
// for the reducer's life; after a backward, `.grad` is a view of that place. Gradients move into the arena one by one
// as they appear, so that at most one exists twice. Sparse gradients have no place there: each is a bucket of its own.
//
// Life of a synchronised step: prepare_for_backward() -> a hook per parameter -> a bucket whose last gradient came is
// reduced (in plan order on every rank) -> after the last bucket has started, a callback at the end of backward waits
// for all. Hooks in a backward that does not synchronise (no_sync) only move the gradient into the arena.
//
// Which backward synchronises: one after a forward that prepared it, as in torch's reducer, and any other through
// outputs that announce() was given, if set_sync(true) holds then. Reducing what was reduced before does no harm: the
// mean of equal means is the mean. Any other backward (of the inner module, of a penalty) stays this rank's own.
//
// A static graph's first synchronised step counts how often each parameter's hook fires and reduces everything at the
// end of backward; later steps wait for as many.
//
// Buckets are rebuilt once, after the first synchronised step, in the order in which rank 0's gradients came (not where
// parameters may be unused: their order means nothing); and, with plan_from_measurement, once more when the gradients'
// times have been seen in the steps after that, in the sizes that leave the least communication exposed. That happens
// when a synchronised backward's first gradient comes: there all ranks take part, and .grad is usually empty still.
// If somebody on any rank refers to a view of the arena beside .grad, all leave everything where it is.
//
// Thread safety: one mutex guards everything; hooks run on autograd's threads, without the GIL.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  struct Options {
    std::vector<int64_t> bucket_caps;  // bytes, in the expected order of buckets; the last repeats
    bool find_unused_parameters = false;
    bool skip_unused_buckets = false;  // those that no parameter of which this rank uses; as on every rank
    std::vector<bool> sparse;          // per parameter: it gets sparse gradients
    int64_t check_replicas_every = 0;  // synchronised steps between two comparisons of the ranks' parameters; 0: never
    std::vector<std::pair<std::string, at::Tensor>> frozen;  // the module's other parameters, which must stay so
    bool shares_norm = false;            // what a reduction finds of the gradients' norm is there for optimizers
    bool plan_from_measurement = false;  // on the CPU, without sparse gradients; must be the same on every rank
    std::string wrapper;                 // which one it is, for messages where there are several
    bool gradients_stay_views = false;   // whatever refers to a gradient shows the next one, too
  };

  // params: the parameters that require a gradient, in registration order; names: theirs, for messages.
  static std::shared_ptr<Reducer> make(std::vector<at::Tensor> params, std::vector<std::string> names,
                                       std::shared_ptr<Comm> comm, const Options& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Whether a backward through announced outputs synchronises although no forward prepared it.
  void set_sync(bool sync) { sync_ = sync; }

  // Before a forward whose backward shall synchronise.
  void prepare_for_forward();

  // Whether somebody refers, beside .grad, to any of these tensors; asked before buckets are rebuilt.
  void set_are_held(std::function<bool(const std::vector<at::Tensor>&)> are_held) { are_held_ = std::move(are_held); }
  // What names the ranks that have ended, "" if none is known to have; asked when a collective has failed.
  void set_ended_ranks(std::function<std::string()> ended_ranks) { ended_ranks_ = std::move(ended_ranks); }
  // By parameter, where its gradient lies in the arena (undefined: nowhere, it is sparse); and who is told when that
  // has changed, after the gradients that are being accumulated have moved.
  std::vector<at::Tensor> gradient_places() const;
  void set_on_moved(std::function<void(const std::vector<at::Tensor>&)> on_moved) { on_moved_ = std::move(on_moved); }
  // The same of one parameter whose gradient is yet to come; undefined where it must come as autograd brings it.
  at::Tensor free_place(size_t index);
  // Whether the buckets have been rebuilt in the first step's order.
  bool has_rebuilt_buckets();

  // After a forward whose backward shall synchronise. outputs: the forward's tensors, from which unused parameters are
  // found. Throws if the step before was left incomplete, naming the parameters that got no gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  // After any forward that records a graph, with its outputs as the script gets them. Ranks must give theirs together.
  void announce(const std::vector<at::Tensor>& outputs);

  // Around a backward whose loss was multiplied with this rank's weight (tokens, say). The gradients of the next
  // synchronised backward are then the sum over ranks divided by the sum of weights, not by the number of ranks. Throws
  // if .grad holds what no weight counts; on a device other than the CPU in a later call, once the host has heard of
  // it, as it waits for nothing.
  void begin_weighted(double weight);
  void end_weighted(bool failed);

  // Reduces at once what weighted backwards under no_sync() have collected, for an accumulation that ends without a
  // backward that synchronises. Other ranks may be in that one; a rank that has collected nothing counts with 0.
  void reduce_collected();

  // The next step is one of ranks that may run out of inputs; divides by that many (0: all) instead of all.
  void set_joining(int64_t divisor);

  // Counts from the next synchronised step on; see above.
  void set_static_graph();
  bool is_graph_known();
  // At the end of a static graph's first synchronised backward.
  void delay_all_reduce();

  // Gives every bucket to a hook instead of the transport. Throws if there is one already.
  void set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  // The hook steps the parameters and keeps or drops their gradients as it likes.
  void set_optimizer_in_backward();
  // Is told of the parameters of each bucket, by index, once their .grad are what a synchronised backward leaves there,
  // while that goes on where it can be known so early (else at its end), and whether the bucket is the last; null:
  // nobody. May take .grad away.
  void set_on_reduced(std::function<void(const std::vector<size_t>&, bool)> on_reduced);
  // Parameters have that dtype in forward and backward only; gradients arrive through on_gradient(), in that dtype.
  void set_mixed_precision(at::ScalarType dtype);
  // Another set of ranks from the next step on.
  void set_comm(std::shared_ptr<Comm> comm);
  // Forgets a step that was interrupted.
  void reset_state();
  // Whether the same parameters were used in every synchronised step so far.
  bool is_graph_static();
  // The last error that this reducer raised; empty: none.
  std::string last_error();
  // Called, once, at the end of the synchronised backward under way or next.
  void add_end_callback(std::function<void()> callback);

  // What parameter `index`'s hook does.
  void on_gradient(size_t index, bool came = true);

  // Takes part in the reduction of bucket `index` with zeros, for a rank that has run out of inputs. as_sum: the
  // others' divisor is not the number of ranks.
  std::unique_ptr<PendingReduce> reduce_zeros(size_t index, bool as_sum);

  // Before that, where the others' backward begins: takes part in the planning of buckets, if it is due.
  void shadow_planning();
  // Waits for what reduce_zeros() began.
  void wait_for_zeros(size_t index, PendingReduce& reduce);
  // And takes part in the reduction of the map of used parameters, where there is one.
  void shadow_used_map();
  // Such a rank's counterpart of a finished step.
  void count_shadowed_step();

  // Throws if a synchronised backward has begun and not ended.
  void check_finalized();

  void remove_autograd_hooks();

  struct BucketInfo {
    std::vector<std::string> names;
    int64_t bytes = 0;  // of gradients, padding not counted
    std::string dtype;
  };
  std::vector<BucketInfo> buckets() const;
  int64_t arena_bytes() const { return arena_bytes_; }

  // When the last synchronised step did what; nanoseconds of the monotonic clock, 0: not yet.
  struct Times {
    int64_t forward_start = 0;
    int64_t backward_start = 0;  // the first gradient came
    int64_t backward_end = 0;    // the last gradient came
    int64_t comm_start = 0;      // the first bucket was given to the transport
    int64_t comm_end = 0;        // the last was back
    int64_t buckets_reduced = 0;
    int64_t exposed = 0;  // a duration: backward stood still in the transport or a hook, or waited for it at its end
  };
  Times times();

  // Kept up to date for whoever watches this reducer; may outlive it.
  std::shared_ptr<Progress> progress() const { return progress_; }
  // What is known of the present buckets' timeline.
  struct PlanReport {
    std::vector<ExpectedBucket> expected;  // per bucket; empty: not measured
    std::string why_not;                   // then, if it was tried
    Costs costs;
    std::vector<double> exposed_s;  // of the last steps with these buckets
  };
  PlanReport plan_report();

  // For each parameter how many ranks used it in the last synchronised backward, if that was found out; else whether
  // this rank has used it since.
  at::Tensor used_map();

 private:
  static constexpr int64_t kTagDigits = 4;      // three of the step, one of the bucket; exact in every floating type
  static constexpr int64_t kMeasuredSteps = 3;  // after the step whose gradients gave the order
  static std::atomic<int> num_reducers_;        // in this process

  Reducer(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
          const Options& options);

  enum class Phase {
    kFilling,   // waits for gradients
    kFull,      // has them all, waits for the buckets before it to start
    kReducing,  // with the transport
  };

  class Hook;
  class OutputHook;
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    bool sparse = false;
    at::ScalarType grad_dtype = at::kFloat;  // of its .grad, as far as mixed precision does not say otherwise
    size_t bucket = 0;
    int64_t offset = 0;  // bytes from the bucket's start
    at::Tensor view;     // its place in the arena, strided as the gradient layout contract asks; what .grad becomes
    bool ready = false;  // in this step
    bool without_grad = false;  // this rank has no gradient for it in this step
    bool delegated = false;     // another wrapper around the same parameter reduces it in this backward
    at::Tensor untouched;       // copy of a kept .grad of such a parameter, put back if no rank used it
    at::Tensor differentiable;  // its .grad in a backward with create_graph: stays .grad, gets the mean's values
    uint32_t version = 0;       // of the tensor, when its backward was prepared
    std::pair<const void*, uint32_t> weighted;  // seen_grad() after the last backward with a weight
    int fired = 0;                              // hooks in this step
    int expected = 1;                           // hooks that make it ready; a static graph's first step counts them
    bool used_somewhere = true;                 // by any rank, in a static graph
    std::shared_ptr<torch::autograd::Node> accumulator;
    uintptr_t hook = 0;
  };

  struct Bucket {
    std::vector<size_t> params;
    std::shared_ptr<const std::string> label;  // "bucket 7 of 12 [layer3.weight, ...]"
    bool sparse = false;
    bool ends_group = true;  // small ones wait for the next, and are started together
    int64_t offset = 0;      // bytes from the arena's start
    int64_t end = 0;         // likewise; of its tags, where it has any
    // All of it, padding included, one-dimensional and in the parameters' dtype; or the sparse gradient.
    at::Tensor flat;
    // On a transport that wants tags: [ranks * kTagDigits] after flat, each rank's digits at its place, which the
    // sum leaves as they are; and all that is reduced, with flat. Else undefined.
    at::Tensor tags, tagged;
    at::Tensor kept;  // what .grad shows there, while a rank without inputs reduces zeros; undefined: nothing
    size_t missing = 0;
    Phase phase = Phase::kFilling;
    std::unique_ptr<PendingReduce> reduce;  // null: there is nothing to wait for
    HookReduce* hooked = nullptr;           // the same, where a hook reduces
  };

  // How a step's gradients become means.
  struct Scaling {
    double before = 1;   // factor on the way into the arena
    bool as_sum = true;  // else the transport leaves the mean
  };

  void noting_errors(const std::function<void()>& body);
  std::vector<ParamSize> param_sizes() const;
  std::vector<BucketPlan> plan(const std::vector<int64_t>& order) const;
  bool were_zeroed(size_t came);
  void forget_zeroed_weights();
  at::Tensor hold_anything(const std::vector<at::Tensor>& grads) const;
  void check_late();
  void check_given_up();
  void divide_by_weights();
  [[noreturn]] void fail_unweighted() const;
  void note_stream(c10::Device device);
  void join_streams(c10::Device device);
  void wait_for_streams(c10::Device device) const;
  std::vector<c10::Stream> streams_of_accumulators() const;
  void wait_for_accumulators() const;
  void let_accumulators_wait() const;
  void keep_for_streams(const at::Tensor& memory) const;
  std::pair<const void*, uint32_t> seen_grad(const Parameter& param) const;
  bool is_rebuild_due() const;
  void rebuild_buckets();
  void rebuild_in_order();
  void rebuild_from_measurement();
  bool are_views_held() const;
  bool is_in_place(const std::vector<BucketPlan>& plans) const;
  std::vector<at::Tensor> copy_kept_gradients() const;
  void put_back(const std::vector<at::Tensor>& kept);
  void sum_now(const at::Tensor& flat, const std::string& what);
  int64_t obstacle_to_planning() const;
  std::vector<int64_t> from_rank_0(const std::vector<int64_t>& values, const std::shared_ptr<const std::string>& what);
  void check_same_everywhere(const std::vector<BucketPlan>& plans);
  std::vector<at::Tensor> gather_over_ranks(const std::vector<double>& values, const std::string& what);
  std::vector<double> time_all_reduces(const std::vector<int64_t>& sizes);
  void build_arena(const std::vector<BucketPlan>& plans);
  std::vector<int64_t> registration_order() const;
  void handle_gradient(size_t index, bool came);
  void prepare(const std::vector<at::Tensor>& outputs);
  void finalize();
  void add_hooks();
  at::ScalarType grad_dtype(const Parameter& param) const;
  at::Tensor view_of(const Parameter& param) const;
  template <class Body>
  void with_grad(Parameter& param, Body&& body);
  void take_gradient(Parameter& param, double scale);
  void move_gradient(Parameter& param, at::Tensor& grad, double scale);
  const void* address_of(const Parameter& param) const;
  bool is_in_place(const Parameter& param, const at::Tensor& grad) const;
  void leave_to_holders(Parameter& param);
  void fill_view(Parameter& param, const at::Tensor& values, double scale);
  void check_gradient(const Parameter& param, const at::Tensor& grad) const;
  void check_unconsumed(const Parameter& param, bool came) const;
  bool claim(const Parameter& param) const;
  void release_params();
  void mark_ready(size_t index);
  void fill_place(Parameter& param);
  void mark_rest_unused();
  void begin_backward();
  void on_output();
  void reduce_announced(int task);
  void reduce_gradients();
  void mark_rest_unused_at_end();
  bool start_full_buckets();
  std::unique_ptr<PendingReduce> start_sum(const at::Tensor& flat, Purpose purpose);
  int64_t tag_bytes(const BucketPlan& plan) const;
  void write_tags(Bucket& bucket);
  void check_tags(const Bucket& bucket);
  void start_full_buckets_in_backward();
  void start(Bucket& bucket);
  void reduce(Bucket& bucket);
  [[noreturn]] void fail_start(const std::string& what, const std::exception& error);
  bool is_skipped(const Bucket& bucket) const;
  bool shares_used_map() const;
  void finalize_backward();
  bool can_hand_over_early() const;
  void hand_over_reduced(size_t waits_for);
  void make_room_for(const Bucket& bucket);
  void hand_over_next();
  void finish_bucket(Bucket& bucket);
  void finish_param(Parameter& param, bool used_somewhere);
  void wait_for_buckets();
  void share_norm();
  void drain();
  void forget_step();
  bool lies_in_arena(const at::Tensor& tensor) const;
  void wait_for(PendingReduce& reduce, const std::shared_ptr<const std::string>& what, int64_t needed);
  int64_t place_of(size_t bucket) const { return Progress::kGradients + static_cast<int64_t>(bucket) + 1; }
  int64_t place_of_all() const { return place_of(buckets_.size() - 1); }
  [[noreturn]] void fail_collective(const std::string& what, const std::string& report) const;
  void compare_replicas();
  void end_interrupted_step();
  void check_hooked(const Parameter& param) const;
  void check_frozen() const;
  void reset();
  std::string describe(const Bucket& bucket) const;  // what its label is made of
  [[noreturn]] void fail_incomplete() const;
  [[noreturn]] void fail_changed_graph(const Parameter& param) const;

  std::vector<Parameter> params_;
  std::vector<Bucket> buckets_;
  std::map<std::string, at::Tensor> arenas_;  // by device
  std::vector<BucketPlan> plans_;
  std::shared_ptr<Comm> comm_;
  bool wants_tags_ = true;  // the transport, when the arena was built
  at::Tensor tag_digits_;   // float32, as Bucket::tags
  const Options options_;
  int64_t arena_bytes_ = 0;

  std::unique_ptr<c10d::CommHookInterface> comm_hook_;
  bool optimizer_in_backward_ = false;
  std::optional<at::ScalarType> low_precision_;
  std::atomic<bool> sync_{true};

  enum class Graph {
    kDynamic,
    kStaticUnknown,  // counting, or about to
    kStaticKnown,
  };
  Graph graph_ = Graph::kDynamic;

  mutable std::recursive_mutex mutex_;  // a communication hook may ask this reducer something
  // The synchronised step under way.
  enum class Step {
    kIdle,      // none: hooks only collect
    kPrepared,  // a forward asked for synchronisation, no gradient yet
    kRunning,   // gradients arrive
  };
  Step step_ = Step::kIdle;
  // Of distributed autograd over RPC, which keeps gradients by itself instead of in .grad; null: not under it.
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> rpc_context_;
  int forwards_ = 0;  // prepared since the last synchronised backward
  // An announced backward that no forward prepared is under way, or has raised: autograd's number of it, and whether
  // it has brought a gradient.
  bool is_collecting_ = false;
  bool has_collected_ = false;
  int collecting_task_ = -1;
  std::vector<c10::Stream> streams_;  // on which gradients of this step came or were put into buckets
  size_t next_bucket_ = 0;            // the first that has not started
  size_t next_to_hand_over_ = 0;      // the first that on_reduced_ has not been told of
  std::vector<size_t> unused_;        // found from the outputs, marked when backward begins
  Scaling scaling_;
  int64_t divisor_ = 0;  // ranks to divide by; 0: all
  bool is_joining_ = false;
  bool is_weighted_ = false;      // the backward under way has a weight
  int64_t weighted_from_ = 0;     // steps_ when it began
  std::optional<double> weight_;  // this rank's, added up
  // float64 [1]; the weights of gradients that may have been zeroed since, which the device finds out: then 0.
  at::Tensor kept_weight_;
  LateCheck uncounted_;    // gradients that a weighted backward added to, and that no weight counts
  LateCheck unzeroed_;     // gradients with weights that a backward without one added to
  at::Tensor weight_sum_;  // float64 [1], on the parameters' device
  std::unique_ptr<PendingReduce> weight_reduce_;
  at::Tensor local_used_;   // int32 [num params], on the CPU
  at::Tensor global_used_;  // the same summed over ranks; on the parameters' device while under way
  std::unique_ptr<PendingReduce> used_reduce_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::shared_ptr<c10::Event> device_end_;  // of the last step, for progress_; null on the CPU
  Times now_, last_;                        // of the step under way and the last finished one
  int64_t steps_ = 0;                       // synchronised, finished
  at::Tensor replica_hashes_;               // int64 [ranks], this rank's at its place; summed over ranks
  std::unique_ptr<PendingReduce> replica_reduce_;
  std::vector<std::function<void()>> end_callbacks_;
  std::vector<int64_t> fired_;  // parameters in the order in which hooks fired in the first synchronised step
  std::function<bool(const std::vector<at::Tensor>&)> are_held_;
  std::function<void(const std::vector<at::Tensor>&)> on_moved_;
  std::function<std::string()> ended_ranks_;
  std::function<void(const std::vector<size_t>&, bool)> on_reduced_;
  bool reuses_memory_ = false;
  std::exception_ptr hand_over_error_;  // what it has thrown in the step under way
  bool is_rebuilt_ = false;
  bool is_measuring_ = false;  // from the first rebuild to the second
  int64_t measured_from_ = 0;  // steps_ at the first
  bool misses_times_ = false;  // in between: of a step that no backward of this rank brought: of a step that no
                               // backward of this rank brought
  std::vector<double> ready_;  // [kMeasuredSteps][params], seconds from the first gradient
  PlanReport plan_report_;
  bool began_ = false;  // a synchronised forward or backward has begun
  bool is_graph_static_ = true;
  std::vector<bool> last_unused_;
  std::shared_ptr<grad::ReducedNorm> norm_;  // null: not shared
  bool norm_is_due_ = false;                 // the transport can add up squares
  std::string error_;
};

}  // namespace drivetrain::ddp
