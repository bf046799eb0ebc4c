// Finds unused parameters and shares the map of used ones over ranks.
#include "ddp/used_parameters.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "base/transfer.h"
#include "ddp/errors.h"

namespace drivetrain::ddp {
namespace {

using torch::autograd::Node;

// Returns every node that backward from these tensors can reach.
std::unordered_set<Node*> reachable_nodes(const std::vector<at::Tensor>& outputs) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> queue;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) queue.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!queue.empty()) {
    Node* node = queue.back();
    queue.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace

UsedParameters::UsedParameters(const Parameters& params, StepGradients& gradients, Collectives& collectives,
                               bool find_unused)
    : SideSum(collectives, Purpose::kUsedMap, "the map of used parameters"),
      params_(params),
      gradients_(gradients),
      find_unused_(find_unused),
      expected_(params.size(), 1),
      used_somewhere_(params.size(), true),
      local_(at::zeros({static_cast<int64_t>(params.size())}, at::kInt)) {}

bool UsedParameters::is_due() const { return graph_ == Graph::kDynamic ? find_unused_ : collectives_.steps() == 0; }

void UsedParameters::search(const std::vector<at::Tensor>& outputs) {
  RECORD_FUNCTION("drivetrain::search_unused_parameters", std::vector<c10::IValue>());
  const std::unordered_set<Node*> reachable = reachable_nodes(outputs);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (reachable.count(params_[i].accumulator.get()) == 0) unused_.push_back(i);
  }
}

std::vector<size_t> UsedParameters::take_unused() {
  if (graph_ == Graph::kStaticKnown) {
    unused_.clear();
    for (size_t i = 0; i < params_.size(); ++i) {
      if (expected_[i] == 0) unused_.push_back(i);
    }
  }
  return std::exchange(unused_, {});
}

bool UsedParameters::count_hook(size_t param) {
  const int fired = ++gradients_[param].fired;
  if (graph_ == Graph::kDynamic) return true;
  if (graph_ == Graph::kStaticUnknown) return false;
  if (fired > expected_[param]) fail_changed_graph(params_[param], fired, expected_[param]);
  return fired == expected_[param];
}

void UsedParameters::expect_as_counted() {
  for (size_t i = 0; i < params_.size(); ++i) expected_[i] = gradients_[i].fired;
}

at::Tensor UsedParameters::values() {
  global_ = copied_to(local_, params_[0].tensor.device());
  return global_;
}

void UsedParameters::finish() {
  bool any_unused = false;
  std::vector<bool> without_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    without_grad.push_back(gradients_[i].without_grad);
    any_unused |= gradients_[i].without_grad;
  }
  if (collectives_.steps() > 1 && without_grad != last_without_grad_) has_stayed_the_same_ = false;
  last_without_grad_ = std::move(without_grad);
  // The step's only host wait for a device.
  if (pending() != nullptr && (any_unused || graph_ == Graph::kStaticUnknown)) global_ = global_.cpu();
}

bool UsedParameters::find_used(size_t param, bool skipped) {
  bool used = is_used(param);
  if (gradients_[param].without_grad) {
    if (pending() != nullptr) used = global_.data_ptr<int32_t>()[param] > 0;
    if (skipped) used = false;
  }
  if (graph_ == Graph::kStaticUnknown) used_somewhere_[param] = used;
  return used;
}

void UsedParameters::reset() {
  unused_.clear();
  SideSum::reset();
}

// As in torch, this rank repeats the map of its last step: the parameters used on any rank. The others' `.grad` of such
// a parameter is then their mean even if none of them uses it any more.
void UsedParameters::shadow(int64_t position) {
  if (!is_due()) return;
  const at::Device device = params_[0].tensor.device();
  const bool repeats = graph_ == Graph::kDynamic && global_.defined();
  at::Tensor used = repeats ? global_.clamp_max(1).to(device) : at::zeros_like(local_, device);
  sum_now(used, position);
  if (graph_ == Graph::kDynamic) {
    global_ = used;
    return;
  }
  used = used.cpu();
  for (size_t i = 0; i < params_.size(); ++i) used_somewhere_[i] = used.data_ptr<int32_t>()[i] > 0;
}

at::Tensor UsedParameters::map() const {
  const at::Tensor& used = global_.defined() ? global_ : local_;
  return used.is_cpu() ? copied_to(used, params_[0].tensor.device()) : used.clone();
}

}  // namespace drivetrain::ddp
