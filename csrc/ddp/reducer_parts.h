// Declares the parts of a reducer, and the state of the current step that they share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/bucket_planner.h"
#include "ddp/bucket_queue.h"
#include "ddp/collectives.h"
#include "ddp/errors.h"
#include "ddp/grad_buffer.h"
#include "ddp/gradient_check.h"
#include "ddp/parameter.h"
#include "ddp/parameter_claims.h"
#include "ddp/replicas.h"
#include "ddp/side_sum.h"
#include "ddp/step_gradients.h"
#include "ddp/step_streams.h"
#include "ddp/step_times.h"
#include "ddp/uneven_inputs.h"
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
};

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

// Invariant: the parts refer to each other, so that the object never moves. Each has its own state; here is only what
// belongs to the step as a whole.
struct ReducerParts {
  ReducerParts(std::vector<at::Tensor> tensors, std::vector<std::string> names, std::shared_ptr<Comm> comm,
               ReducerOptions given);
  ReducerParts(const ReducerParts&) = delete;
  ReducerParts& operator=(const ReducerParts&) = delete;

  const ReducerOptions options;
  Parameters params;
  StepStreams streams;
  GradBuffer buffer;
  StepGradients gradients;
  Collectives collectives;  // behind the buffer: a transport ends before its memory is freed
  UsedParameters used;
  WeightedMean weights;
  ReplicaCheck replicas;
  GradientCheck check;
  const std::array<SideSum*, 4> side_sums{&used, &weights, &replicas, &check};  // in the order of their start
  UnevenInputs uneven;
  StepTimes now, last;  // of the current step, and of the last finished one
  BucketQueue queue;
  BucketPlanner planner;
  ParameterClaims claims;
  LastError errors;

  StepPhase phase = StepPhase::kIdle;
  NamedTensors frozen;  // the module's other parameters, as long as they require no gradient
  AnnouncedBackward announced;
  BackwardKind kind = BackwardKind::kPrepared;  // of the current step
  int forwards = 0;                             // prepared since the last synchronized backward
  bool has_begun = false;                       // a synchronized forward or backward has begun
  bool optimizer_in_backward = false;  // the communication hook steps parameters, and keeps or drops their gradients
  std::vector<std::function<void()>> end_callbacks;
  // Makes the transport and passes it to set_comm() before this rank's first collective, or returns why it
  // cannot. Null: the transport is there.
  std::function<std::string()> connect;
  // Takes parts of earlier reduced gradients out of `.grad`, which on_reduced has put there; null: there are none.
  std::function<void()> put_aside;
  std::shared_ptr<c10::Event> device_end;  // of the last step, for Progress; null on the CPU

  // ---- Settings.

  // Calls on_reduced for each bucket that is reduced; null: nothing. Later buckets then reuse the memory of earlier
  // ones, where nothing stands against it.
  void set_on_reduced(BucketQueue::OnReduced on_reduced);
  // Declares that every step uses the same parameters. Throws once training has begun.
  void set_static_graph();
  // Gives the gradients this dtype. They then come through Reducer::on_gradient().
  void set_mixed_precision(at::ScalarType dtype);
  // Reduces over another set of ranks from the next step on, or over those that connect() has met from this one on.
  void set_comm(std::shared_ptr<Comm> comm);

  // ---- The step as a whole.

  void reset();
  // Also forgets what was given for this step alone, such as its weight.
  void forget_step();
  // Waits for all collectives in progress in a step that is given up.
  void drain() const;
  // Waits for all collectives of the step.
  void wait_for_all();
  // Begins the check of gradients. Throws where gradients are used before the step ends.
  void begin_gradient_check();
  // Asks the check of gradients, once all collectives have ended. Throws what it found, or returns true if the step's
  // gradients are to be dropped.
  bool must_drop_gradients();
  // Leaves every `.grad` undefined, so that optimizers leave the parameters as they are.
  void drop_gradients();
  // Makes the reduced values `.grad`, unless they were handed over during backward.
  void hand_back_gradients();
  // Ends a step that has begun and was not finalized. Throws if a gradient is missing: the ranks no longer agree on
  // the gradients to reduce. If none is missing, backward raised after the last one and all buckets have started.
  void end_interrupted_step();
  // Forgets a step that was interrupted, after its collectives have ended.
  void reset_state();
  // Throws if a synchronized backward has begun and not ended.
  void check_finalized();
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
};

// Gives every bucket to a hook, in torch's layout. first_caps: torch's bytes per bucket before it rebuilds. Throws if
// there is a hook already, or a backward is in progress.
void set_hook(ReducerParts& parts, std::unique_ptr<c10d::CommHookInterface> hook, std::vector<int64_t> first_caps);

}  // namespace drivetrain::ddp
