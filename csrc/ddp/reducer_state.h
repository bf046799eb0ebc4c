// Declares what a reducer consists of, with its settings and reports; Reducer adds the steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/device_event.h"
#include "ddp/bucket_planner.h"
#include "ddp/bucket_queue.h"
#include "ddp/collectives.h"
#include "ddp/errors.h"
#include "ddp/grad_buffer.h"
#include "ddp/gradient_check.h"
#include "ddp/gradient_noise.h"
#include "ddp/parameter.h"
#include "ddp/part_sums.h"
#include "ddp/replicas.h"
#include "ddp/side_sum.h"
#include "ddp/step_gradients.h"
#include "ddp/step_streams.h"
#include "ddp/used_parameters.h"
#include "ddp/weighted_mean.h"

namespace drivetrain::ddp {

struct ReducerOptions {
  std::vector<int64_t> bucket_caps;  // bytes, in the expected order of buckets; the last repeats
  bool find_unused_parameters = false;
  bool skip_unused_buckets = false;    // those whose parameters are all unused; every rank must leave out the same ones
  std::vector<bool> sparse;            // per parameter: it gets sparse gradients
  int64_t check_replicas_every = 0;    // synchronized steps between two comparisons of the parameters; 0: never
  bool plan_from_measurement = false;  // only on one device, without sparse gradients, and the same on every rank
  std::string wrapper;                 // names the wrapper in messages of processes that have several
  bool gradients_stay_views = false;   // tensors kept over a `.grad` show the parameter's next gradient as well
  int64_t logical_ranks = 0;           // parts of a window; only weighted backwards synchronize; 0: windows have none
  NamedTensors frozen;                 // the module's other parameters
};

// Invariants: one mutex guards everything. The parts refer to each other, so that the object never moves.
class ReducerState {
 protected:
  using Lock = std::lock_guard<std::recursive_timed_mutex>;

  template <class Body>
  auto locked(Body&& body) {
    const Lock lock(mutex_);
    return std::forward<Body>(body)();
  }

 public:
  ReducerState(const ReducerState&) = delete;
  ReducerState& operator=(const ReducerState&) = delete;

  // ---- Settings.

  // Gives every bucket to a hook, in torch's layout. first_caps: torch's bytes per bucket before it rebuilds. Throws if
  // there is a hook already, or a backward is in progress.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<int64_t> first_caps);
  // Calls on_reduced for each bucket that is reduced; null: nothing. Later buckets then reuse the memory of earlier
  // ones, where nothing stands against it.
  void set_on_reduced(BucketQueue::OnReduced on_reduced);
  // Declares that every step uses the same parameters. Throws once training has begun.
  void set_static_graph();
  // Says that the communication hook steps parameters, and keeps or drops their gradients.
  void set_optimizer_in_backward() {
    locked([&] { optimizer_in_backward_ = true; });
  }
  // Reduces over another set of ranks from the next step on, or over those that connect() has met from this one on.
  void set_comm(std::shared_ptr<Comm> comm);
  // connect: makes the transport and passes it to set_comm() before this rank's first collective, or returns why it
  // cannot.
  void set_connect(std::function<std::string()> connect) {
    locked([&] { connect_ = std::move(connect); });
  }
  // The following three: see Collectives, and GradBuffer::Settings.
  void set_ended_ranks(std::function<std::string()> ended_ranks) {
    locked([&] { collectives_.set_ended_ranks(std::move(ended_ranks)); });
  }
  void set_are_held(std::function<bool(const std::vector<at::Tensor>&)> are_held) {
    locked([&] { buffer_.settings.are_held = std::move(are_held); });
  }
  void set_on_moved(std::function<void(const std::vector<at::Tensor>&)> on_moved) {
    locked([&] { buffer_.settings.on_moved = std::move(on_moved); });
  }
  // Lets each rank keep a part of every reduced gradient only, by parameter, in elements. Takes effect with the next
  // layout of the buffer, which set_on_reduced() makes.
  void set_kept(std::vector<RankRanges> kept);
  // put_aside: takes parts of earlier reduced gradients out of `.grad`, which on_reduced has put there. Their owner
  // also divides weighted sums.
  void set_put_aside(std::function<void()> put_aside);
  // Calls the function with what reads gradients before their reduction. It must not keep them.
  template <class Body>
  auto with_checks(Body&& body) {
    return locked([&] { return std::forward<Body>(body)(check_, noise_); });
  }
  // Calls the function once at the end of the current step, or of the next.
  void add_end_callback(std::function<void()> callback) {
    locked([&] { end_callbacks_.push_back(std::move(callback)); });
  }

  // ---- Reports.

  // Returns the published progress, which may outlive the reducer, without taking the mutex.
  std::shared_ptr<Progress> progress() const { return collectives_.progress(); }
  StepTimes times() {  // of the last finished step
    return locked([&] { return last_; });
  }
  PlanReport plan_report() {
    return locked([&] { return planner_.report(); });
  }
  std::vector<BucketInfo> buckets() {
    return locked([&] { return buffer_.infos(); });
  }
  int64_t buffer_bytes() {
    return locked([&] { return buffer_.bytes(); });
  }
  std::vector<at::Tensor> gradient_views() {
    return locked([&] { return buffer_.views(); });
  }
  bool has_rebuilt_buckets() {
    return locked([&] { return planner_.has_rebuilt(); });
  }
  std::string last_error() {
    return locked([&] { return errors_.message(); });
  }
  bool is_graph_known() {
    return locked([&] { return used_.graph() == Graph::kStaticKnown; });
  }
  bool has_graph_stayed_the_same() {
    return locked([&] { return used_.has_stayed_the_same(); });
  }
  at::Tensor used_map() {
    return locked([&] { return used_.map(); });
  }

 protected:
  // The state of the current synchronized step.
  enum class StepPhase {
    kIdle,      // no step: hooks only move gradients into the buffer
    kPrepared,  // a forward asked for synchronization, no gradient has come
    kRunning,   // gradients come
  };

  // An announced backward that no forward has prepared.
  struct AnnouncedBackward {
    bool is_under_way = false;  // or has raised
    bool has_gradient = false;
    int task = -1;  // autograd's number of it
  };

  // The part in steps of which some ranks have run out of inputs.
  struct Uneven {
    bool is_joining = false;  // ranks may have run out of inputs
    int64_t divisor = 0;      // divides the sum instead of the number of ranks; 0: the number of ranks
    // Where this rank has none, by bucket: copies of values that `.grad` shows while it reduces zeros in their memory.
    // Undefined where nothing shows them, and absent behind the last bucket that has some.
    std::vector<at::Tensor> kept = {};
  };

  ReducerState(std::vector<at::Tensor> params, std::vector<std::string> names, std::shared_ptr<Comm> comm,
               ReducerOptions options);
  ~ReducerState() = default;

  // ---- The step as a whole.

  void reset();
  // Also forgets what was given for this step alone, such as its weight.
  void forget_step();
  // Waits for all collectives in progress in a step that is given up.
  void drain() const;
  // Waits for all collectives of the step.
  void wait_for_all();
  // Ends a step that has begun and was not finalized. Throws if a gradient is missing: the ranks no longer agree on
  // the gradients to reduce. If none is missing, backward raised after the last one and all buckets have started.
  void end_interrupted_step();
  // Begins the sums besides the buckets. Throws where gradients are to be checked and are used before the step ends.
  void begin_side_sums();
  // Asks the check of gradients, once all collectives have ended. Throws what it found, or returns true if the step's
  // gradients are to be dropped.
  bool must_drop_gradients();
  // Leaves every `.grad` undefined, so that optimizers leave the parameters as they are.
  void drop_gradients();
  // Makes the reduced values `.grad`, unless they were handed over during backward.
  void hand_back_gradients();
  // Calls connect(), if it is set, and rebuilds the buckets, if that is due.
  void rebuild_buckets();
  // Throws if the watchdog has found that the current step cannot end.
  void check_given_up();
  // Throws if a hook has taken the gradient that has just come (came). Notes a change of the parameter by a hook. Ranks
  // compare it before they reduce the gradient, as a constant factor is the same on all of them.
  void check_unconsumed(size_t param, bool came);
  [[noreturn]] void fail_incomplete() const;
  // Returns the region where the parameter's next gradient will lie; undefined where autograd must bring it.
  at::Tensor free_region(size_t param);
  Scaling choose_scaling() const;
  // Returns the purpose of the buckets of the current step.
  Purpose bucket_purpose() const;
  // Lets hosts agree on the collectives of the step that begins.
  void promise_collectives();
  // Marks the end of the step for the watchdog, on a device by an event.
  void mark_end();

  std::recursive_timed_mutex mutex_;  // recursive: a communication hook may ask this reducer something
  ReducerOptions options_;
  Parameters params_;
  StepStreams streams_;
  GradBuffer buffer_;
  StepGradients gradients_;
  PartSums part_sums_;
  Collectives collectives_;  // behind the buffer: a transport ends before its memory is freed
  UsedParameters used_;
  WeightedMean weights_;
  ReplicaCheck replicas_;
  GradientCheck check_;
  GradientNoise noise_;
  // In the order of their start.
  const std::array<SideSum*, 5> side_sums_{&used_, &weights_, &replicas_, &check_, &noise_};
  StepTimes now_, last_;  // of the current step, and of the last finished one
  BucketQueue queue_;
  BucketPlanner planner_;
  ParameterClaims claims_;
  LastError errors_;

  StepPhase phase_ = StepPhase::kIdle;
  AnnouncedBackward announced_;
  Uneven uneven_;
  BackwardKind kind_ = BackwardKind::kPrepared;  // of the current step
  int forwards_ = 0;                             // prepared since the last synchronized backward
  bool has_begun_ = false;                       // a synchronized forward or backward has begun
  bool optimizer_in_backward_ = false;
  std::vector<std::function<void()>> end_callbacks_;
  std::function<std::string()> connect_;     // null: the transport is there
  std::function<void()> put_aside_;          // null: gradients stay whole
  std::shared_ptr<DeviceEvent> device_end_;  // of the last step, for Progress; null on the CPU
};

}  // namespace drivetrain::ddp
