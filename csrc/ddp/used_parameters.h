// Declares which parameters a step uses, and the state of a static graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/parameter.h"
#include "ddp/side_sum.h"
#include "ddp/step_gradients.h"

namespace drivetrain::ddp {

enum class Graph {
  kDynamic,
  kStaticUnknown,  // the first step counts how often each parameter's hook fires
  kStaticKnown,    // later steps wait for as many
};

// Finds the unused parameters of a step, and shares the map of used parameters over ranks where a rank may not use all.
//
// Invariant: is_due() is the same on every rank, even on one that has run out of inputs and saw no static graph.
class UsedParameters : public SideSum {
 public:
  UsedParameters(const Parameters& params, StepGradients& gradients, Collectives& collectives, bool find_unused);

  Graph graph() const { return graph_; }
  void set_graph(Graph graph) { graph_ = graph; }
  // Returns true if the used parameters may change from step to step.
  bool may_change() const { return find_unused_ && graph_ == Graph::kDynamic; }
  // Returns true if the current step shares the map over ranks.
  bool is_due() const override;
  // Returns true if every synchronized step so far used the same parameters.
  bool has_stayed_the_same() const { return has_stayed_the_same_; }

  // ---- A step, in the order of calls.

  // Finds the parameters that backward from these outputs does not reach.
  void search(const std::vector<at::Tensor>& outputs);
  // Returns the parameters that are known to be unused, and forgets them.
  std::vector<size_t> take_unused();
  // Notes that this rank has a gradient for the parameter.
  void note_used(size_t param) { local_.data_ptr<int32_t>()[param] = 1; }
  // Counts one hook of the parameter. Returns true if it has all of the step's gradients. Throws if it has more than a
  // static graph's first step.
  bool count_hook(size_t param);
  // Ends the counting of a static graph's first step.
  void expect_as_counted();
  // Finds which parameters a rank used, after the sum. On a device this waits for the sum where this rank left one out.
  void finish();
  // Returns true if some rank used the parameter, as far as this rank knows it without the step's sum.
  bool is_used(size_t param) const { return !gradients_[param].without_grad || used_somewhere_[param]; }
  // Returns true if some rank used the parameter; after finish(). skipped: its bucket was not reduced.
  bool find_used(size_t param, bool skipped);
  // The map counts from here.
  void end_step() override { local_.zero_(); }
  void reset() override;

  // Takes part in the sum for a rank that has run out of inputs. position: where ranks have started the sum.
  void shadow(int64_t position);
  // Returns for each parameter the number of ranks that used it in the last synchronized backward: int32 [parameters].
  // If no map was shared, the number is 1 for those that this rank has used since.
  at::Tensor map() const;

 private:
  at::Tensor values() override;

  const Parameters& params_;
  StepGradients& gradients_;
  const bool find_unused_;
  Graph graph_ = Graph::kDynamic;
  std::vector<size_t> unused_;
  std::vector<int> expected_;         // by parameter: hooks of a step; counted for a static graph
  std::vector<bool> used_somewhere_;  // by parameter: by any rank, in a static graph
  std::vector<bool> last_without_grad_;
  bool has_stayed_the_same_ = true;
  at::Tensor local_;   // int32 [parameters], on the CPU
  at::Tensor global_;  // the sum over ranks; on the parameters' device while it is in progress
};

}  // namespace drivetrain::ddp
