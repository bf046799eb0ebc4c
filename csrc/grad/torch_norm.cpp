// Computes torch's norms of several gradients at once; see torch_norm.h.
#include "grad/torch_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "base/parallel.h"

namespace drivetrain::grad {
namespace {

// Returns whether torch sums the gradient's squares on one thread, so that the number of threads changes no bit. Its
// float16 and float64 norms, and norms of other layouts, may be sums of parts.
bool is_summed_on_one_thread(const at::Tensor& grad) {
  return (grad.scalar_type() == at::kFloat || grad.scalar_type() == at::kBFloat16) && grad.is_contiguous();
}

}  // namespace

at::Tensor torch_norms(const std::vector<at::Tensor>& grads) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kPerThread = 1 << 15;  // elements at least
  int64_t total = 0;
  for (const at::Tensor& grad : grads) total += grad.numel();
  const int64_t threads =
      std::min<int64_t>({at::get_num_threads(), static_cast<int64_t>(grads.size()), total / kPerThread});
  if (threads < 2 || !std::all_of(grads.begin(), grads.end(), is_summed_on_one_thread)) {
    return at::stack(at::_foreach_norm(grads, 2));
  }
  std::vector<size_t> order(grads.size());  // the largest first, so that threads end together
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return grads[a].numel() > grads[b].numel(); });
  std::vector<at::Tensor> norms(grads.size());
  std::atomic<size_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const at::NoGradGuard no_grad_on_this_thread;
    for (size_t i = next++; i < order.size(); i = next++) {
      norms[order[i]] = at::linalg_vector_norm(grads[order[i]], 2);
    }
  });
  return at::stack(norms);
}

}  // namespace drivetrain::grad
